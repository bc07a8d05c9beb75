"""The Temporal Fusion Transformer at inference, with weights that other libraries have trained."""

from lowgpu.tft.importing import from_pytorch_forecasting, load_pytorch_forecasting
from lowgpu.tft.layout import Selection, TFTShape
from lowgpu.tft.model import TFT
from lowgpu.tft.nvidia import from_neuralforecast, from_nvidia
from lowgpu.tft.quantizing import QuantizedTFT, quantize_tft
from lowgpu.tft.report import quantile_loss, tft_report

__all__ = [
    "TFT",
    "QuantizedTFT",
    "Selection",
    "TFTShape",
    "from_neuralforecast",
    "from_nvidia",
    "from_pytorch_forecasting",
    "load_pytorch_forecasting",
    "quantile_loss",
    "quantize_tft",
    "tft_report",
]
