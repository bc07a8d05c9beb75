"""`lowgpu quantize`: a run's policy in int8, with a report of what that costs and a gate."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

FAILED = 1


def register(app, in_one_sentence):
    """Add the command to an app.

    Args:
        app: a typer.Typer.
        in_one_sentence: a context that turns errors into a sentence and an exit code.
    """

    @app.command()
    def quantize(
        run: Annotated[Path, typer.Argument(help="Folder of a run.")],
        data: Annotated[
            Path | None,
            typer.Option(
                help="Bars as CSV, whose training split is calibrated on; without it the run's own."
            ),
        ] = None,
        method: Annotated[
            str, typer.Option(help="Ranges of activations: mse, percentile or minmax.")
        ] = "mse",
        percentile: Annotated[
            float, typer.Option(help="Of the values at either end, for percentile.")
        ] = 99.99,
        copies: Annotated[
            int | None,
            typer.Option(help="Of each input column; without it as many as agreement needs."),
        ] = None,
        unit_copies: Annotated[
            int | None,
            typer.Option(help="Of each hidden unit; with --copies, 1 without it."),
        ] = None,
        agreement: Annotated[
            float,
            typer.Option(help="Share of held-out rows with the same greedy action, at least."),
        ] = 0.99,
        fine_tune: Annotated[
            int, typer.Option(help="Steps of quantization-aware fine-tuning; 0 is none.")
        ] = 0,
        device: Annotated[
            str, typer.Option(help="That fine-tuning runs on: cpu, cuda, or auto.")
        ] = "cpu",
        onnx: Annotated[bool, typer.Option("--onnx", help="Write quantized.onnx too.")] = False,
        as_json: Annotated[
            bool, typer.Option("--json", help="Print one JSON object on standard output.")
        ] = False,
    ):
        """Quantize a run's last checkpoint to int8 and compare it with float32 on held-out data.

        The ranges of activations come from what the greedy policy meets on training bars, or in
        episodes; the comparison from the test split, or from other episodes. The run's folder gets
        quantized.safetensors, quantized.json and quantized.txt. The exit code is 1 where the
        comparison does not pass; the files are written all the same, and say so.
        """
        with in_one_sentence():
            from lowgpu.quantization.run import quantize_run

            both = tuple(1 if count is None else count for count in (copies, unit_copies))
            report, text = quantize_run(
                run,
                data=data,
                agreement=agreement,
                copies=None if copies is None and unit_copies is None else both,
                fine_tune=fine_tune,
                device=device,
                onnx=onnx,
                method=method,
                percentile=percentile,
            )
        print(json.dumps(report) if as_json else text, flush=True)
        refuse_failed(report)


def after_training(directory, settings):
    """(report, text) of a run that its `quantize` section quantizes at its end; (None, "") without.

    Fine-tuning is on the CPU wherever the run was trained, so its integers are the same.
    """
    own = settings.quantize
    if not own.fine_tune:
        return None, ""
    from lowgpu.quantization.run import quantize_run

    return quantize_run(directory, fine_tune=own.fine_tune, agreement=own.agreement)


def refuse_failed(report):
    """Say what a report's gate refused, and leave with exit code 1 where it did."""
    for failure in report["failed"]:
        print(f"lowgpu: {failure}", file=sys.stderr)
    if not report["passed"]:
        raise typer.Exit(FAILED)
