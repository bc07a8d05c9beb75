"""What bfloat16 and INT8 cost a transformer's quantile loss: `python -m bench.tft_accuracy WEIGHTS WINDOWS`.

`python -m bench.tft_training` makes both files. WEIGHTS is a safetensors file for `load_pytorch_forecasting`;
WINDOWS one of "calibration.NAME" and "held.NAME" arrays, where NAME is an argument of `TFT.predict`, or of
the held ones "target", and "scale" and "location" of each sequence, and whose metadata has "quantiles".
"""

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from safetensors import safe_open

from bench.timing import device_facts, save_document
from lowgpu.tft import TFT, load_pytorch_forecasting, quantize_tft, tft_report

RESULTS = Path(__file__).parent / "results"
BATCH = 32  # sequences that are calibrated with at once


def windows_of(path):
    """({part: {name: array}}, quantiles) of a file."""
    found = {}
    with safe_open(path, framework="np") as file:
        quantiles = json.loads(file.metadata()["quantiles"])
        for key in file.keys():  # noqa: SIM118  it is no mapping
            part, name = key.split(".", 1)
            found.setdefault(part, {})[name] = file.get_tensor(key)
    return found, quantiles


def inputs_of(part, rows=slice(None)):
    """Those of a part's arrays that `TFT.predict` takes."""
    others = "target", "scale", "location", "prediction"
    return {n: a[rows] for n, a in part.items() if n not in others}


def measured(weights, windows):
    """The report of float32, bfloat16 and INT8 on the held-out windows of a file."""
    shape, arrays = load_pytorch_forecasting(weights)
    parts, quantiles = windows_of(windows)
    held, calibration = parts["held"], parts["calibration"]
    single = TFT(shape, arrays)
    firsts = range(0, len(calibration["history_reals"]), BATCH)
    batches = [inputs_of(calibration, slice(first, first + BATCH)) for first in firsts]
    start = time.process_time()
    quantized = quantize_tft(single, batches)
    seconds = time.process_time() - start
    models = {
        "float32": single,
        "bfloat16": TFT(shape, arrays, "bfloat16"),
        "int8": TFT(shape, quantized.arrays, "int8"),
    }
    found = tft_report(
        models, inputs_of(held), held["target"], quantiles, held["scale"], held["location"]
    )
    steps = [held[f"{n}_reals"].shape[1] for n in ("history", "future")]
    about = {"hidden": shape.hidden, "heads": shape.heads, "steps": steps}
    return found | about | {"calibration": quantized.summary | {"cpu_seconds": seconds}}


def main(
    weights: Annotated[Path, typer.Argument(help="pytorch-forecasting's, as safetensors")],
    windows: Annotated[Path, typer.Argument(help="calibration and held-out windows")],
    out: Annotated[Path, typer.Option(help="where the JSON goes")] = RESULTS / "tft_int8.json",
):
    """Quantize a transformer and compare its quantile loss; the exit code is 1 where it rises by over 1 %."""
    found = measured(weights, windows)
    for name in ("float32", "bfloat16", "int8"):
        row = found[name]
        print(f"{name:10} quantile loss {row['quantile_loss']:.6f}  {row['rise']:+.4%}")
    save_document(out, {"facts": device_facts(), "report": found})
    raise typer.Exit(0 if found["int8"]["rise"] <= 0.01 else 1)


if __name__ == "__main__":
    typer.run(main)
