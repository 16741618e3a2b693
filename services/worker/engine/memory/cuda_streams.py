"""The work stream and the copy stream of an NVIDIA GPU; see `device_copies`.

The copy stream has a higher priority: its kernels are short, and behind all blocks of a prefill's
kernels they would wait for milliseconds.
"""

import torch


class CudaStreams:
    """Streams of `device`. Create it on the engine's thread, which has the device as current one.

    Copies use two buffers on the device, so that they never allocate: copies run one after another,
    so all of them share the buffers.
    """

    def __init__(self, device: torch.device, *, copy_bytes: int, block_bytes: int) -> None:
        """`copy_bytes`: maximum size of a copy. `block_bytes`: a KV block's size in one layer."""
        self._device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(self._device)
        self._work = torch.cuda.default_stream(self._device)
        self._copies = torch.cuda.Stream(self._device, priority=-1)
        size_bytes = max(copy_bytes, block_bytes)
        self._scratch = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        self._index = torch.empty(size_bytes // block_bytes, dtype=torch.int64, device=self._device)
        # The buffers were allocated in the work stream.
        self._copies.wait_stream(self._work)

    def bind(self) -> None:
        """Make the device current in the calling thread."""
        torch.cuda.set_device(self._device)

    def pinned(self, size_bytes: int) -> torch.Tensor:
        """Return pinned host memory, uint8 [size_bytes]."""
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def record_work(self) -> torch.cuda.Event:
        """Return an event after all work launched so far."""
        return self._recorded(self._work)

    def record_copies(self) -> torch.cuda.Event:
        """Return an event after all copies started so far."""
        return self._recorded(self._copies)

    def work_waits(self, event: torch.cuda.Event) -> None:
        """Start work launched from now on after `event`."""
        self._work.wait_event(event)

    def copies_wait(self, event: torch.cuda.Event) -> None:
        """Start copies from now on after `event`."""
        self._copies.wait_event(event)

    def gather(self, rows: torch.Tensor, index: torch.Tensor, target: torch.Tensor) -> None:
        """Start to copy `rows[index]`, [any, n], to `target`, uint8; both arguments are pinned."""
        with torch.cuda.stream(self._copies):
            scratch = self._scratch[: target.numel()]
            gathered = scratch.view(rows.dtype).view(len(index), -1)
            torch.index_select(rows, 0, self._device_index(index), out=gathered)
            target.copy_(scratch, non_blocking=True)

    def scatter(self, rows: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> None:
        """Start to copy `source`, uint8, to `rows[index]`, [any, n]; both are pinned."""
        with torch.cuda.stream(self._copies):
            scratch = self._scratch[: source.numel()]
            scratch.copy_(source, non_blocking=True)
            rows[self._device_index(index)] = scratch.view(rows.dtype).view(len(index), -1)

    def read(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Start to copy device memory to pinned memory of the same size."""
        with torch.cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)

    def write(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start to copy pinned memory to device memory of the same size."""
        with torch.cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)

    def _device_index(self, index: torch.Tensor) -> torch.Tensor:
        return self._index[: len(index)].copy_(index, non_blocking=True)

    @staticmethod
    def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(stream)
        return event
