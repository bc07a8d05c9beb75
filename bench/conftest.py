"""Options of `python -m pytest bench`, and the device in its report."""

from bench.timing import device_facts


def pytest_addoption(parser):
    group = parser.getgroup("ops")
    group.addoption(
        "--sizes",
        choices=("small", "declared"),
        default="small",
        help="the sizes that ops declare, or the same cut to what a CPU does in a moment (default)",
    )
    group.addoption(
        "--device",
        choices=("cpu", "cuda"),
        default="cuda" if _gpu() else "cpu",
        help="where the arrays are: NumPy or CuPy; the default is the GPU where there is one",
    )


def _gpu():
    try:
        import cupy
    except ImportError:
        return False
    return cupy.cuda.is_available()


def pytest_report_header(config):
    return f"bench: {config.getoption('sizes')} sizes on {config.getoption('device')}"


def pytest_benchmark_update_machine_info(config, machine_info):
    machine_info["device"] = device_facts()
