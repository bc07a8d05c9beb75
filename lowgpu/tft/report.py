"""What quantization does to a transformer's quantile loss on windows that it was not calibrated on."""

import numpy as np


def quantile_loss(prediction, target, quantiles, future_lengths=None):
    """The mean pinball loss of all quantiles, sequences and steps.

        e    = target - prediction
        loss = mean of max(q e, (q - 1) e)

    Args:
        prediction: [sequences, future, quantiles].
        target: [sequences, future], in the prediction's units.
        quantiles: in (0, 1), of the prediction's columns.
        future_lengths: steps of each sequence that count; all where left out.

    Returns:
        a float.

    Raises:
        ValueError: shapes that do not go together, a quantile out of range, or numbers that count
            and are not finite.

    Source: Koenker & Bassett 1978.
    """
    prediction, target = (np.asarray(a, np.float64) for a in (prediction, target))
    quantiles = np.asarray(quantiles, np.float64)
    if prediction.shape != (*target.shape, *quantiles.shape) or target.ndim != 2:
        raise ValueError(
            f"prediction must be [sequences, future, quantiles] of target {list(target.shape)} and "
            f"{quantiles.size} quantiles, got {list(prediction.shape)}"
        )
    if not ((quantiles > 0) & (quantiles < 1)).all():
        raise ValueError(f"quantiles must be in (0, 1), got {quantiles.tolist()}")
    counts = np.ones(target.shape, bool)
    if future_lengths is not None:
        counts = np.arange(target.shape[1]) < np.asarray(future_lengths)[:, None]
    error = (target[..., None] - prediction)[counts]
    if error.size == 0 or not np.isfinite(error).all():
        raise ValueError("target and prediction must be finite and hold a step that counts")
    return float(np.maximum(quantiles * error, (quantiles - 1) * error).mean())


def tft_report(models, windows, target, quantiles, scale=1.0, location=0.0):
    """The quantile loss of several models of the same weights on held-out windows.

    Args:
        models: {name: TFT}; the first is what the others are compared with.
        windows: arguments of `TFT.predict`, NumPy arrays.
        target: [sequences, future], what came.
        quantiles: that the prediction's columns are of.
        scale, location: target = location + scale * prediction, numbers or one a sequence.

    Returns:
        {"sequences": ..., name: {"quantile_loss": ..., "rise": ..., "signal_to_noise": ...}}: `rise`
        is relative to the first model's loss, and `signal_to_noise` is in dB of its prediction.

    Raises:
        ValueError: as of `quantile_loss` and `TFT.predict`.
    """
    of_sequence = lambda a: np.asarray(a, np.float64).reshape(-1, *[1] * 2)  # noqa: E731
    scale, location = of_sequence(scale), of_sequence(location)
    found, first = {"sequences": len(target)}, None
    for name, model in models.items():
        made = np.asarray(model.predict(**windows).prediction, np.float64)
        loss = quantile_loss(
            location + scale * made, target, quantiles, windows.get("future_lengths")
        )
        if first is None:
            first = made.copy(), loss
        noise = float(np.square(made - first[0]).mean())
        signal = float(np.square(first[0] - first[0].mean()).mean())
        found[name] = {
            "quantile_loss": loss,
            "rise": loss / first[1] - 1,
            "signal_to_noise": 10 * np.log10(signal / noise) if noise and signal else None,
        }
    return found
