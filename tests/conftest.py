"""Settings of every test process: offline, one thread, quick files first, slow tests on request."""

import logging
import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)
logging.getLogger("torch.__trace").addFilter(lambda _: False)  # else shown with every failure

#: Quick files first; files not named here run between these two groups.
FIRST = ("test_tiny", "test_errors", "test_axes", "test_communication", "test_hard_cases")
LAST = ("test_models", "test_gloo", "test_checkpoint", "test_zoo")


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def _position(item: pytest.Item) -> int:
    name = item.path.stem
    if name in FIRST:
        return FIRST.index(name)
    return len(FIRST) + (1 + LAST.index(name) if name in LAST else 0)


def pytest_collection_modifyitems(config, items):
    items.sort(key=_position)
    if config.getoption("--slow") or config.option.markexpr:
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
