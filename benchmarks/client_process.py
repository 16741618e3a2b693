"""Run the load generator in a separate process and read its records."""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from tideserve.cli.errors import SystemUnavailable
from tideserve.cli.local_cluster import python_environment
from tideserve.load.client import Job
from tideserve.load.record import RequestOutcome, SentRequest

REPOSITORY = Path(__file__).resolve().parents[1]
# Grace after the job's own deadline, to start the interpreter and write the result.
GRACE_S = 60.0


def run_job(job: Job, on_progress: Callable[[str], None]) -> tuple[SentRequest, ...]:
    """Send the job's requests from a separate process. Raises SystemUnavailable if it dies."""
    with tempfile.TemporaryDirectory(prefix="tideserve-bench-") as folder:
        job_path, result_path = Path(folder) / "job", Path(folder) / "result"
        job_path.write_bytes(msgspec.msgpack.encode(job))
        # Write stderr to a file: an unread pipe could fill up and block the client.
        errors = Path(folder) / "errors"
        command = [sys.executable, "-m", "tideserve.load.client", str(job_path), str(result_path)]
        with (
            errors.open("wb") as stderr,
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=python_environment(),
            ) as process,
        ):
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    on_progress(line.strip())
                status = process.wait(GRACE_S)
            finally:
                process.kill()
        if status != 0 or not result_path.exists():
            last = errors.read_text(errors="replace").strip().splitlines()[-1:]
            raise SystemUnavailable(f"the load generator ended with {status}: {' '.join(last)}")
        records = msgspec.msgpack.decode(result_path.read_bytes(), type=tuple[SentRequest, ...])
    # Records arrive in order of completion.
    return tuple(sorted(records, key=lambda record: record.due_s))


def run_answered(job: Job) -> tuple[SentRequest, ...]:
    """Like `run_job`, but also raises SystemUnavailable if a request does not complete."""
    records = run_job(job, lambda line: None)
    failed = [record for record in records if record.outcome is not RequestOutcome.COMPLETED]
    if failed:
        places = ", ".join(job.urls)
        raise SystemUnavailable(f"{len(failed)} requests over {places} failed: {failed[0].error}")
    return records
