# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # One kernel, from its spec to its machine code
#
# The op is `gae`, generalised advantage estimation. Nothing here needs a GPU: kernels are compiled,
# measured in registers and disassembled without one. Where there is one, the comparison with the
# spec runs the kernel itself.

# %%
import html
import inspect
import re
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import HTML, Code, display

from lowgpu_kernels import gae, launch
from lowgpu_kernels.arrays import Buffer
from lowgpu_kernels.compile import disassemble
from lowgpu_kernels.device import cuda, f32
from lowgpu_kernels.dims import E, T
from lowgpu_kernels.op import blocks
from lowgpu_kernels.ops.advantage.gae import THREADS, gae_kernel
from lowgpu_kernels.ops.advantage.steps import ahead_of, delta_of, read_group

SHOWN = [launch.KNOWN[name] for name in ("A100", "L4", "H100")]

# %% [markdown]
# ## The spec
#
# An op is a NumPy function. Its annotations are the only place that says shapes, element types and
# ranges; calls are checked by them, outputs allocated, tests drawn and benches counted.

# %%
for name, spec in {**gae.inputs, **gae.params, **gae.outputs}.items():
    print(f"{name:12} {spec}")
body = inspect.getsource(gae.spec).rpartition('"""')[2]
display(Code(body.strip("\n"), language="python"))

# %% [markdown]
# ## The CPU executor
#
# The same name, called with NumPy arrays. Three steps of one environment whose time ran out:
# the value of the last state goes on.

# %%
reward, value = np.ones((3, 1), "f4"), np.full((3, 1), 2, "f4")
ended = np.zeros((3, 1), bool)
limit = np.array([[False], [False], [True]])
got = gae(reward, value, value[0], ended, limit, value)
print(got.advantage.ravel(), got.returns.ravel())
np.testing.assert_allclose(got.advantage.ravel(), [2.76853945, 1.90169, 0.98], rtol=1e-6)

# %% [markdown]
# ## The kernel
#
# Numba compiles this for a GPU: a thread an environment. It works on a group of steps at a time:
# `read_group` has all of their loads in flight before it uses the first. `delta_of` and `ahead_of` are
# the scalar steps that the CPU's loop calls too, so both round alike.

# %%
display(Code(inspect.getsource(gae_kernel.function), language="python"))
display(Code(inspect.getsource(getattr(read_group, "py_func", read_group)), language="python"))


# %% [markdown]
# ## Its launch
#
# `launch.recording` takes down launches for a device instead of making them. A `Buffer` is an
# address, a shape and an element type; nobody reads the address here. `gae` launches twice: what is
# shown here, and a block that merges the moments. With fewer environments it would launch
# `gae_scan_kernel`, which cuts their time into chunks as well.


# %%
def recorded(launcher, steps, envs, device):
    """The first launch of a launcher for gae, on a device that need not be there."""
    by_step = Buffer(0, (steps, envs), np.dtype("f4"))
    flags = Buffer(0, (steps, envs), np.dtype(bool))
    last_value = Buffer(0, (envs,), np.dtype("f4"))
    inputs = by_step, by_step, last_value, flags, flags, by_step
    moments = Buffer(0, (2,), np.dtype("f4"))
    with launch.recording(device) as made:
        shape, dtype = gae.scratch_specs({"T": steps, "E": envs}, {})["partials"]
        outputs = by_step, by_step, moments, Buffer(0, shape, np.dtype(dtype))
        launcher(*inputs, np.float32(0.99), np.float32(0.95), *outputs, 0)
    return made[0]


for device in SHOWN:
    made = recorded(gae.cuda, 128, 131072, device)
    resources = made.resources(device)
    print(
        f"{device.name:5} {device.architecture:7} grid {made.grid}, block {made.block}: "
        f"{resources.registers} registers, {resources.spill_stores} B spilled, "
        f"{resources.shared} B shared; "
        f"{launch.occupancy(resources, THREADS, on=device)}; {made.grid[0] / device.sms:.2f} blocks "
        "for each SM"
    )

# %% [markdown]
# ## Occupancy by block size
#
# An SM gives out registers by the warp, shared memory by the block, and has room for a number of
# threads and blocks. Small blocks run into the last, larger ones into registers: a group of steps in
# registers has a thread's loads in flight together, and leaves room for fewer threads. The H100 still
# holds all 131072 at once.

# %%
sizes = np.arange(32, 1025, 32)
figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
for device in SHOWN:
    resources = recorded(gae.cuda, 128, 131072, device).resources(device)
    found = [launch.occupancy(resources, int(n), on=device) for n in sizes]
    axes.plot(sizes, [f.fraction for f in found], label=device.name, drawstyle="steps-mid")
    print(
        f"{device.name:5}", {int(n): f.limit for n, f in zip(sizes, found) if n in (32, 128, 512)}
    )
axes.set(xlabel="threads a block", ylabel="occupancy", ylim=(0, 1.05))
axes.legend()
plt.show()

# %% [markdown]
# ## Roofline
#
# Bytes follow from the signature, operations from the op's own count. Bandwidth (bytes a second) and
# float32 operations a second without tensor cores are those of the data sheets of the A100 80 GB SXM,
# the L4 and the H100 SXM. Left of the corner the memory bounds a kernel, right of it arithmetic.

# %%
PEAKS = {"A100": (2.039e12, 19.5e12), "L4": (0.300e12, 30.3e12), "H100": (3.35e12, 67e12)}


def nbytes_of(op, sizes):
    """Bytes that a call must move, with every optional array given."""
    specs = [*op.inputs.values(), *op.outputs.values()]
    return sum(int(np.prod(s.resolve(sizes))) * s.dtype({}).itemsize for s in specs)


print(f"{'size':16} {'MB':>8} {'flops/B':>8}" + "".join(f"{n + ', µs':>12}" for n in PEAKS))
for declared in gae.bench:
    counts = dict(pair.split("=") for pair in declared.split())
    sizes = {T: int(counts["T"]), E: int(counts["E"])}
    nbytes = nbytes_of(gae, sizes)
    flops = gae.flops(**{dim.name: size for dim, size in sizes.items()})
    least = [max(nbytes / bandwidth, flops / peak) * 1e6 for bandwidth, peak in PEAKS.values()]
    print(
        f"{declared:16} {nbytes / 1e6:8.1f} {flops / nbytes:8.2f}", *(f"{t:11.1f}" for t in least)
    )

# %%
figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
intensity = np.logspace(-2, 3, 200)
for name, (bandwidth, peak) in PEAKS.items():
    axes.loglog(intensity, np.minimum(bandwidth * intensity, peak) / 1e12, label=name)
axes.axvline(flops / nbytes, color="0.3", linestyle=":", label="gae")
axes.set(xlabel="operations a byte", ylabel="TFLOP/s at most")
axes.legend()
axes.grid(alpha=0.3)
plt.show()

# %% [markdown]
# ## Machine code
#
# A loop is a label and a branch back to it. Below, what each loop of the H100's code is made of, and
# the shortest that reads memory, loads highlighted. That loop is a group of steps: its loads stand
# together, and the arithmetic that waits for them comes after. Final values, which few groups have, are
# the loads behind the branch. Many other lines work out addresses: numba counts indices in 64 bits.


# %%
def loops_of(sass):
    """{label: its lines} of every loop of a disassembly, from the label to the branch back."""
    lines, labels, loops = sass.splitlines(), {}, {}
    for at, line in enumerate(lines):
        if found := re.match(r"(\.L_x_\d+):", line):
            labels[found[1]] = at
        elif (found := re.search(r"BRA `\((\.L_x_\d+)\)", line)) and found[1] in labels:
            body = [text for text in lines[labels[found[1]] : at + 1] if "/*" in text]
            # A branch to itself ends a kernel and is never reached.
            if len(body) > 1:
                loops[found[1]] = body
    return loops


h100 = launch.KNOWN["H100"]
sass = disassemble(recorded(gae.cuda, 128, 131072, h100).kernel.binary(h100.architecture))
loops = loops_of(sass)
print(f"{'loop':8} {'instructions':>12} {'LDG':>4} {'STG':>4} {'LDS':>4}")
for label, lines in loops.items():
    counts = [sum(code in line for line in lines) for code in (" LDG", " STG", " LDS")]
    print(f"{label:8} {len(lines):12}", *(f"{count:4}" for count in counts))

# %%
reading = [lines for lines in loops.values() if any(" LDG" in line for line in lines)]
shortest = min(reading, key=len)
marked = (
    f"<b style='color:#b03060'>{html.escape(line)}</b>" if " LDG" in line else html.escape(line)
    for line in shortest
)
display(HTML("<pre style='line-height:1.2'>" + "\n".join(marked) + "</pre>"))

# %% [markdown]
# ## Agreement with the spec
#
# The spec runs in float64. The allowed difference is a formula: so many roundings of float32, times
# the largest value around. Arrays on a GPU run the kernel, arrays on the CPU its twin.

# %%
try:
    import cupy

    arrays = cupy if cupy.cuda.is_available() else np
except ImportError:
    arrays = np


def difference(function, steps=128, envs=129, seed=0):
    """The largest difference of advantages and returns, as a share of what the op allows."""
    rng = np.random.default_rng(seed)
    reward, value, final_value = rng.normal(size=(3, steps, envs)).astype("f4")
    inputs = reward, value, value[0], *(rng.random((2, steps, envs)) < 0.1), final_value
    want = gae.spec(*(a if a.dtype == bool else a.astype("f8") for a in inputs))
    got = function(*map(arrays.asarray, inputs))
    scale = max(1.0, *(np.abs(a).max() for a in (*inputs, *want)))
    allowed = gae.error(T=steps, E=envs) * 2.0**-23 * scale
    # CuPy arrays come to the CPU by `get`.
    on_cpu = [a.get() if hasattr(a, "get") else a for a in got]
    return max(np.abs(w - g).max() for w, g in zip(want[:2], on_cpu)) / allowed


share = difference(gae)
print(f"{arrays.__name__}: {share:.1%} of the allowed difference")
assert share < 1

# %% [markdown]
# ## A variant of your own
#
# The textbook's kernel: a step at a time, each of which waits for its own loads. Write the kernel,
# write a launcher with the op's arguments, and look at it as above. This one leaves the moments out.


# %%
@launch.kernel(threads=128)
def serial_kernel(
    reward, value, last_value, terminated, truncated, final_value, gamma, lam, advantage, returns
):
    # A thread owns an environment; neighbouring lanes read neighbouring elements of a row.
    e = cuda.grid(1)
    steps, envs = reward.shape
    if e < envs:
        ahead, next_value = f32(0), last_value[e]
        for t in range(steps - 1, -1, -1):
            limit = truncated[t, e]
            if limit:
                next_value = final_value[t, e]
            delta = delta_of(reward[t, e], value[t, e], next_value, terminated[t, e], gamma)
            ahead = delta + gamma * lam * ahead_of(limit or terminated[t, e], ahead)
            next_value = value[t, e]
            advantage[t, e] = ahead
            returns[t, e] = ahead + next_value


def serial_launch(*arguments):
    *arguments, _, _, stream = arguments  # the moments and their scratch
    envs = arguments[0].shape[1]
    serial_kernel[blocks(envs, 128), 128, stream](*arguments)


for launcher in (gae.cuda, serial_launch):
    made = recorded(launcher, 128, 131072, h100)
    sass = disassemble(made.kernel.binary(h100.architecture))
    together = max(sum(" LDG" in line for line in lines) for lines in loops_of(sass).values())
    print(
        f"{made.kernel.function.__name__:14} {made.resources(h100).registers:4} registers, {together} "
        "loads in its longest loop"
    )

# %% [markdown]
# A bound on the block size is a bound on registers: told to fit 1024 threads, the compiler has 64
# registers a thread at most, and says whether it spills.

# %%
kernel = recorded(serial_launch, 128, 131072, h100).kernel
for threads in (128, 512, 1024):
    bound = replace(kernel, threads=threads).binary(h100.architecture)
    resources = bound.kernel(None)
    print(
        f"{threads:5} threads: {resources.registers} registers, {resources.spill_stores} B spilled"
    )

# %% [markdown]
# On a GPU the variant is held to the spec by making it the op's launcher. In the package that is one
# line, `@gae.on_cuda`, or a new op in a file of its own with a line in `ops/__init__.py`: from then
# on it is tested, compiled for three architectures, benched and documented like all others.

# %%
if arrays is not np:
    ours = gae.cuda
    try:
        gae.on_cuda(serial_launch)
        share = difference(gae)
    finally:
        gae.on_cuda(ours)
    print(f"serial_launch: {share:.1%} of the allowed difference")
    assert share < 1
