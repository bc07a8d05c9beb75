"""compute-sanitizer's runner without a GPU: what it calls, how it reads reports, when it fails."""

import importlib
import pkgutil
import re
import sys
import time

import numpy as np
import pytest

from lowgpu_kernels import compile as lg_compile
from lowgpu_kernels import launch, ops
from lowgpu_kernels.arrays import Buffer
from lowgpu_kernels.dims import Choice, Static
from lowgpu_kernels.op import OPS
from tests.harness import every_op, kinds_of_real, poisoned_outputs
from tests.sanitize import __main__ as runner
from tests.sanitize.calls import CANARY_THREADS, canary, cases_of, launch_canary
from tests.sanitize.report import calls_made, caught, faults, read

CLEAN = """\
========= COMPUTE-SANITIZER
call gae float32 T=1 E=1
made 1 calls
========= ERROR SUMMARY: 0 errors
"""
# Messages as the tools word them, each about the planted fault of its tool.
FOUND = {
    "memcheck": """\
========= COMPUTE-SANITIZER
call write_past_the_end
========= Invalid __global__ write of size 4 bytes
=========     at write_past_the_end+0x70
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x7f3c7ec00100 is out of bounds
=========
========= Invalid __global__ write of size 4 bytes
=========     at write_past_the_end+0x70
=========     by thread (1,0,0) in block (0,0,0)
=========
========= Error: process didn't terminate successfully
========= ERROR SUMMARY: 1,064 errors were not printed. Use --print-limit to adjust
========= ERROR SUMMARY: 1,066 errors
""",
    "racecheck": """\
========= COMPUTE-SANITIZER
call race_in_shared_memory
========= Error: Race reported between Write access at race_in_shared_memory+0xd0
=========     and Read access at race_in_shared_memory+0xe0 [256 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
""",
    "initcheck": """\
========= COMPUTE-SANITIZER
call read_before_write
========= Uninitialized __global__ memory read of size 4 bytes
=========     at 0x60 in read_before_write
=========     by thread (31,0,0) in block (0,0,0)
=========     Address 0x7f3c7ec000fc
=========
========= ERROR SUMMARY: 1 error
""",
    "synccheck": """\
========= COMPUTE-SANITIZER
call barrier_of_a_few
========= Barrier error detected. Divergent thread(s) in warp.
=========     at barrier_of_a_few+0xc0
=========     by thread (0,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 1 error
""",
}
each_tool = pytest.mark.parametrize("tool", runner.TOOLS.values(), ids=lambda tool: tool.name)


def as_buffer(array):
    return None if array is None else Buffer(0x7F0000000000, array.shape, array.dtype)


def launches_of(case):
    """What a case launches on an H200, recorded."""
    named = {dim.name: size for dim, size in case.sizes.items()}
    outputs = poisoned_outputs(case.op, case.sizes, case.params, case.real)
    with launch.recording(launch.KNOWN["H200"]) as made:
        work = [
            Buffer(0x7E0000000000, shape, np.dtype(dtype))
            for shape, dtype in case.op.scratch_specs(named, case.params, case.real).values()
        ]
        arrays = (*map(as_buffer, case.inputs.values()), *case.params.values())
        case.op.cuda(*arrays, *map(as_buffer, outputs), *work, 0)
    return made


def name_of(kernel):
    return kernel.entry or kernel.function.__name__


def kernels_written():
    """Every kernel in the folder of ops: entries of .cu files and Numba kernels of modules."""
    names = set()
    for path in (lg_compile.HERE / "ops").rglob("*.cu"):
        text = re.sub(r"__launch_bounds__\([^)]*\)", "", path.read_text())
        names |= set(re.findall(r"__global__\s+void\s+(?:__\w+__\([^)]*\)\s+)*(\w+)\(", text))
    for module in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}."):
        members = vars(importlib.import_module(module.name)).values()
        names |= {m.__name__ for m in members if isinstance(m, launch.Launchable)}
    return names


def test_the_calls_launch_every_kernel_there_is():
    reached = set()
    for op in every_op:
        for case in cases_of(op):
            made = launches_of(case)
            assert made, f"{case} launches nothing"
            reached |= {name_of(launched.kernel) for launched in made}
    written = kernels_written()
    assert len(written) > len(every_op)
    assert reached == written


@pytest.mark.parametrize("op", every_op, ids=str)
def test_the_calls_take_every_choice_at_every_precision(op):
    made = list(cases_of(op))
    reals = set(op.params["precision"].values) if "precision" in op.params else None
    assert {c.real for c in made} == (reals or set(kinds_of_real(op, op.params)))
    for name, kind in op.params.items():
        if op.examples is None and isinstance(kind, (Choice, Static)):
            values = kind.values if isinstance(kind, Choice) else kind.examples()
            assert {c.params[name] for c in made} == set(values)
    if op.examples is not None:
        for together in op.examples():
            assert any(together.items() <= c.params.items() for c in made)


def test_the_calls_are_the_same_every_time():
    for op in every_op:
        first, again = list(cases_of(op)), list(cases_of(op))
        assert [str(c) for c in first] == [str(c) for c in again]
        for a, b in zip(first, again):
            for name, array in a.inputs.items():
                assert array is None or array.tobytes() == b.inputs[name].tobytes()


@pytest.mark.parametrize("architecture", lg_compile.ARCHITECTURES.values())
def test_each_planted_fault_is_still_there_in_the_machine_code(architecture):
    binary = canary("barrier_of_a_few").binary(architecture)
    assert {k.entry for k in binary.kernels} == {t.canary for t in runner.TOOLS.values()}
    assert not any(k.spill_stores or k.spill_loads for k in binary.kernels)
    text = lg_compile.disassemble(binary)
    code = {part.partition(":")[0]: part for part in text.split("\n.text.")[1:]}
    assert "STG" in code["write_past_the_end"]
    race = code["race_in_shared_memory"]
    assert "STS" in race and "LDS" in race and "BAR.SYNC" not in race
    assert "LDG" in code["read_before_write"]
    assert re.search(r"@!?P\d BAR\.SYNC", code["barrier_of_a_few"])


@each_tool
def test_a_planted_fault_is_launched_like_any_kernel(tool):
    x = as_buffer(np.zeros(CANARY_THREADS, "f4"))
    with launch.recording(launch.KNOWN["H200"]) as made:
        launch_canary(tool.canary, x, x)
    (launched,) = made
    assert (launched.kernel.entry, launched.block) == (tool.canary, (CANARY_THREADS, 1, 1))


@each_tool
def test_a_planted_fault_counts_as_caught_under_its_own_tool_only(tool):
    assert caught(FOUND[tool.name], tool.kind, tool.canary)
    assert not caught(CLEAN, tool.kind, tool.canary)
    for other in runner.TOOLS.values():
        assert caught(FOUND[other.name], tool.kind, tool.canary) == (other is tool)
    elsewhere = re.sub(rf"(?<!call ){tool.canary}", "gae_kernel", FOUND[tool.name])
    assert not caught(elsewhere, tool.kind, tool.canary)


def test_a_finding_is_read_with_its_lines_and_the_call_it_belongs_to():
    report = read(FOUND["memcheck"])
    first, second, ending = report.findings
    assert first.head == second.head == "Invalid __global__ write of size 4 bytes"
    assert first.details[0] == "at write_past_the_end+0x70" and len(first.details) == 3
    assert first.call == "write_past_the_end"
    assert ending.head == "Error: process didn't terminate successfully"
    assert report.counted == 1066
    assert read(FOUND["racecheck"]).counted == 1


def test_a_run_is_clean_only_when_nothing_is_missing():
    assert calls_made(CLEAN) == 1
    assert faults(CLEAN, 0, 1) == []
    assert faults(CLEAN, 0, 2) == ["made 1 of 2 calls"]
    assert faults(CLEAN, 1, 1) == ["exit status 1"]
    assert faults(CLEAN, None, 1) == ["stopped at its time limit"]
    without_summary = CLEAN.replace("========= ERROR SUMMARY: 0 errors\n", "")
    assert faults(without_summary, 0, 1) == ["no summary of the tool"]
    assert faults(CLEAN.replace("0 errors", "2 errors"), 0, 1) == ["the tool counts 2"]
    assert faults(CLEAN.replace("made 1 calls\n", ""), 0, 1) == ["made not all of 1 calls"]


@pytest.mark.parametrize(
    "message",
    [
        "Error: Device not supported. Please refer to the documentation",
        "Error: Target application terminated before first instrumented API call",
        "Internal Sanitizer Error: The Sanitizer encountered an error while launching gae_kernel",
        "Warning: Race reported between Write access at gae_kernel+0x10",
        "Warning: Detected overflow of tracked cuda::barrier structures.",
    ],
)
def test_a_message_that_is_not_known_to_be_harmless_is_a_finding(message):
    said = CLEAN.replace("made", f"========= {message}\nmade")
    assert faults(said, 0, 1) == ["findings: 1"]
    assert read(said).findings[0].call == "gae float32 T=1 E=1"


# Stands for compute-sanitizer: runs nothing, says what the real one would say of a clean project
# whose planted faults are found, but for the part that is broken.
PRETENDED = """\
#!{python}
import subprocess, sys
clean, found, broken, arguments = {clean!r}, {found!r}, {broken!r}, sys.argv
tool = arguments[arguments.index("--tool") + 1]
if "canary" in arguments:
    print(clean if broken == "canary " + tool else found[tool])
elif broken == "hangs":
    print(clean, flush=True)
    subprocess.run([sys.executable, "-c", "import time; time.sleep(20)"])
elif broken == "ops " + tool:
    print(found[tool].replace("call ", "call gae "))
    sys.exit(86)
else:
    print(clean)
"""


@pytest.fixture
def pretended(tmp_path, monkeypatch):
    """A function that runs the runner with a stand-in for the sanitizer: its exit status."""

    def started(broken, *arguments):
        script = tmp_path / "compute-sanitizer"
        texts = {"clean": CLEAN, "found": FOUND, "broken": broken}
        script.write_text(PRETENDED.format(python=sys.executable, **texts))
        script.chmod(0o700)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        plain = [sys.executable, "-c", "print('made 1 calls')"]
        monkeypatch.setattr(runner, "calls", lambda kind, *names: [*plain, kind, *names])
        return runner.main(list(arguments))

    return started


def test_the_runner_passes_when_all_is_clean_and_every_planted_fault_found(pretended, capsys):
    assert pretended("nothing") == 0
    table = capsys.readouterr().out.splitlines()[-5:]
    assert [row.split()[0] for row in table] == ["none", *runner.TOOLS]
    assert all("caught" in row and "clean, 1 calls" in row for row in table[1:])


def test_the_runner_fails_when_a_planted_fault_is_missed(pretended, capsys, tmp_path):
    logs = tmp_path / "logs"
    assert pretended("canary initcheck", "--tool", "initcheck", "--logs", str(logs)) == 1
    said = capsys.readouterr().out
    assert "initcheck did not find read_before_write" in said
    assert re.search(r"initcheck +missed +[\d.]+ +not run", said)
    assert (logs / "initcheck-canary.log").read_text().startswith("========= COMPUTE-SANITIZER")


def test_the_runner_fails_on_a_finding_and_says_near_which_call(pretended, capsys):
    assert pretended("ops racecheck", "--tool", "racecheck", "--tool", "memcheck") == 1
    said = capsys.readouterr().out
    assert "Race reported between Write access" in said
    assert "[near call gae race_in_shared_memory]" in said
    assert re.search(r"racecheck +caught .* findings: 1; the tool counts 1; exit status 86", said)
    assert re.search(r"memcheck +caught .* clean, 1 calls", said)


def test_the_runner_stops_what_hangs_and_all_it_started_and_fails(pretended, capsys, monkeypatch):
    monkeypatch.setattr(runner, "OPS_SECONDS", 2)
    start = time.monotonic()
    assert pretended("hangs", "--tool", "memcheck") == 1
    assert time.monotonic() - start < 15  # what it started would sleep for 20 s
    assert "stopped at its time limit" in capsys.readouterr().out


def test_the_runner_says_so_where_there_is_no_sanitizer(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(runner, "PLACES", ())
    assert runner.main([]) == 2
    assert "compute-sanitizer not found" in capsys.readouterr().err


def test_the_runner_fails_when_the_ops_do_not_run_without_a_tool(pretended, monkeypatch, capsys):
    real = runner.run
    broken = [sys.executable, "-c", "raise SystemExit('no GPU')"]
    monkeypatch.setattr(runner, "run", lambda command, limit: real(broken, limit))
    assert pretended("nothing") == 1
    assert "no GPU" in capsys.readouterr().out


@pytest.mark.gpu
def test_the_calls_of_an_op_are_made_on_a_gpu():
    ran = runner.run(runner.calls("ops", "gae"), 120)
    expected = len(list(cases_of(OPS["gae"])))
    assert (ran.status, calls_made(ran.output)) == (0, expected), ran.output
