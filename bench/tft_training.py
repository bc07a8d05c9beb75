"""A transformer trained by pytorch-forecasting on the built-in bars: `python -m bench.tft_training FOLDER`.

Needs pytorch-forecasting 1.8 and pandas, which nothing else here does. Writes weights.safetensors and
windows.safetensors, which `bench.tft_accuracy` reads. The last bars of each series are held out: the
windows to compare on predict them, those before choose when training was best, and neither is trained on.
"""

import json
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from safetensors.numpy import save_file

from lowgpu.tft.importing import HYPERPARAMETERS

BARS = Path(__file__).parent.parent / "lowgpu" / "data" / "sample" / "stocks.csv.gz"
HISTORY, FUTURE, SERIES, LENGTH = 168, 24, 3, 900
HELD, VALIDATION = 100, 60  # bars of each series behind those that are trained on
BATCH, CALIBRATION, EVERY = 24, 64, 40


def series():
    """The last bars of a few series as pytorch-forecasting takes them."""
    import pandas as pd

    bars, parts = pd.read_csv(BARS), []
    for name, of in list(bars.groupby("Ticker"))[:SERIES]:
        of, close = of.tail(LENGTH), np.log(of["Close"].tail(LENGTH).to_numpy())
        date = pd.to_datetime(of["Date"])
        columns = {
            "series": name,
            "t": np.arange(len(of)),
            "weekday": date.dt.dayofweek.astype(str).to_numpy(),
            "month": date.dt.month.astype(float).to_numpy(),
            "close": close,
            "volume": np.log(of["Volume"].to_numpy()),
            "change": 100 * np.diff(close, prepend=close[0]),
        }
        parts.append(pd.DataFrame(columns))
    return pd.concat(parts, ignore_index=True)


def data_sets(rows):
    """{"train", "validation", "held": TimeSeriesDataSet}."""
    from pytorch_forecasting import TimeSeriesDataSet

    last = rows["t"].max()
    train = TimeSeriesDataSet(
        rows[rows["t"] <= last - HELD - VALIDATION],
        time_idx="t",
        target="change",
        group_ids=["series"],
        min_encoder_length=HISTORY,
        max_encoder_length=HISTORY,
        min_prediction_length=FUTURE,
        max_prediction_length=FUTURE,
        static_categoricals=["series"],
        time_varying_known_categoricals=["weekday"],
        time_varying_known_reals=["t", "month"],
        time_varying_unknown_reals=["close", "volume", "change"],
        add_relative_time_idx=True,
        add_target_scales=True,
        allow_missing_timesteps=True,
    )
    found = {"train": train}
    for name, kept, first in (
        ("validation", last - HELD, last - HELD - VALIDATION + 1),
        ("held", last, last - HELD + 1),
    ):
        found[name] = TimeSeriesDataSet.from_dataset(
            train, rows[rows["t"] <= kept], min_prediction_idx=first, stop_randomization=True
        )
    return found


def batch_of(data, count, shuffle=False):
    """(x, target) of some windows."""
    size = min(count, len(data))
    loader = data.to_dataloader(train=shuffle, batch_size=size, num_workers=0)
    x, y = next(iter(loader))
    return x, y[0]


def predicted(net, x, size=32):
    import torch

    count = len(x["encoder_cont"])
    parts = [{k: v[a : a + size] for k, v in x.items()} for a in range(0, count, size)]
    with torch.no_grad():
        return torch.cat([net(part)["prediction"] for part in parts])


def trained(data, seconds):
    """(network, quantiles): the state with the least loss on the validation windows."""
    import torch
    from pytorch_forecasting import TemporalFusionTransformer
    from pytorch_forecasting.metrics import QuantileLoss

    quantiles = torch.tensor(QuantileLoss().quantiles)
    net = TemporalFusionTransformer.from_dataset(
        data["train"],
        hidden_size=128,
        hidden_continuous_size=128,
        attention_head_size=4,
        dropout=0.1,
        loss=QuantileLoss(),
    )
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    loader = data["train"].to_dataloader(train=True, batch_size=BATCH, num_workers=0)
    validation, came = batch_of(data["validation"], 4 * EVERY)

    def loss_of(found, target):
        error = target.unsqueeze(-1) - found
        return torch.maximum(quantiles * error, (quantiles - 1) * error).mean()

    best, kept, step, start = np.inf, None, 0, time.process_time()
    while time.process_time() - start < seconds:
        for x, y in loader:
            net.train()
            loss = loss_of(net(x)["prediction"], y[0])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            step += 1
            if step % EVERY == 0:
                net.eval()
                now = float(loss_of(predicted(net, validation), came))
                print(f"step {step}: {float(loss):.4f} trained on, {now:.4f} not", flush=True)
                if now < best:
                    best = now
                    kept = {n: t.clone() for n, t in net.state_dict().items()}
                if time.process_time() - start > seconds:
                    break
    net.load_state_dict(kept)
    net.eval()
    return net, quantiles.tolist()


def arrays_of(net, data, count, shuffle=False):
    """What `bench.tft_accuracy` reads of some windows."""
    x, target = batch_of(data, count, shuffle)
    found = {
        "history_reals": x["encoder_cont"],
        "future_reals": x["decoder_cont"],
        "history_categories": x["encoder_cat"].int(),
        "future_categories": x["decoder_cat"].int(),
        "lengths": x["encoder_lengths"].int(),
        "target": target,
        "location": x["target_scale"][:, 0],
        "scale": x["target_scale"][:, 1],
        "prediction": predicted(net, x),
    }
    return {n: np.ascontiguousarray(t.numpy()) for n, t in found.items()}


def main(
    folder: Annotated[Path, typer.Argument(help="where the files go")],
    seconds: Annotated[float, typer.Option(help="CPU time to train for, at least")] = 300,
):
    """Train and write both files."""
    import torch

    torch.manual_seed(0)
    np.random.seed(0)
    torch.set_num_threads(1)
    data = data_sets(series())
    net, quantiles = trained(data, seconds)
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        n: np.ascontiguousarray(t.numpy())
        for n, t in net.state_dict().items()
        if not n.startswith(("loss", "logging_metrics"))
    }
    hparams = json.dumps({n: net.hparams[n] for n in HYPERPARAMETERS})
    save_file(state, folder / "weights.safetensors", metadata={"hparams": hparams})
    found = {}
    for name, part, count in (("calibration", "train", CALIBRATION), ("held", "held", 1000)):
        for key, array in arrays_of(net, data[part], count, name == "calibration").items():
            found[f"{name}.{key}"] = array
    metadata = {"quantiles": json.dumps(quantiles)}
    save_file(found, folder / "windows.safetensors", metadata=metadata)


if __name__ == "__main__":
    typer.run(main)
