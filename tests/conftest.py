import gc
import threading

import pytest


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU; run by `make gpu`")


def pytest_collection_modifyitems(config, items):
    """GPU tests are skipped, and reported as skipped, where there is no GPU."""
    if any(item.get_closest_marker("gpu") for item in items) and not _gpu():
        skip = pytest.mark.skip(reason="no NVIDIA GPU here: `make gpu` runs this on one")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


@pytest.fixture
def no_thread_is_left():
    before = threading.enumerate()
    yield
    gc.collect()
    assert threading.enumerate() == before


def _gpu():
    try:
        import cupy

        return cupy.cuda.runtime.getDeviceCount() > 0
    except Exception:
        return False
