"""The bytes of all tensors that a piece of code makes: exact, where resident memory is noisy."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorMemory(TorchDispatchMode):
    """Meanwhile ``now`` are the bytes of the tensors that were made and still live, ``peak`` the
    most there were at once. What a kernel or a collective makes for itself is not seen, nor is a
    tensor that no operation returned; meta and fake tensors hold nothing."""

    def __init__(self):
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def now(self) -> int:
        gone = [address for address, (ref, _) in self._live.items() if ref.expired()]
        for address in gone:
            del self._live[address]
        return sum(size for _, size in self._live.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        self.see(results)
        return results

    def see(self, tensors) -> None:
        """Count tensors; operations' results are counted by themselves."""
        new = False
        for tensor in tree_leaves(tensors):
            if not isinstance(tensor, torch.Tensor) or isinstance(tensor, FakeTensor):
                continue
            if tensor.is_meta or tensor.layout is not torch.strided:
                continue
            ref = StorageWeakRef(tensor.untyped_storage())
            known = self._live.get(ref.cdata)
            if known is None or known[0].expired():
                self._live[ref.cdata] = ref, tensor.untyped_storage().nbytes()
                new = True
        if new:
            self.peak = max(self.peak, self.now)


class Resident:
    """The bytes that the process has ``grown`` by at most meanwhile, looked at every five
    milliseconds; 0 where the system does not tell."""

    def __enter__(self):
        self._before = self._most = _resident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()

    @property
    def grown(self) -> int:
        return self._most - self._before

    def _watch(self) -> None:
        while not self._over.wait(0.005):
            self._most = max(self._most, _resident())


def _resident() -> int:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    line = next(text for text in status.splitlines() if text.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024
