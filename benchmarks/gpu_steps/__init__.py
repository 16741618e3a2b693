"""Steps of `scripts/gpu_minutes.py`: each module measures one subject on a GPU as a process.

Every step takes a file for its figures, and `--dry`, which runs the same code on CPUs with tiny
sizes and leaves out what needs the driver.
"""
