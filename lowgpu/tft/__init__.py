"""The Temporal Fusion Transformer at inference, with weights that other libraries have trained."""

from lowgpu.tft.importing import from_pytorch_forecasting, load_pytorch_forecasting
from lowgpu.tft.layout import Selection, TFTShape
from lowgpu.tft.model import TFT
from lowgpu.tft.nvidia import from_neuralforecast, from_nvidia

__all__ = [
    "TFT",
    "Selection",
    "TFTShape",
    "from_neuralforecast",
    "from_nvidia",
    "from_pytorch_forecasting",
    "load_pytorch_forecasting",
]
