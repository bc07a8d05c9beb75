"""The settings of what becomes of a policy in int8 when its run is done."""

from dataclasses import dataclass

from lowgpu.section import Section
from lowgpu_kernels.dims import Float, Int


@dataclass(frozen=True)
class QuantizeConfig(Section):
    """Quantization at the end of a run.

    Args:
        fine_tune: steps of quantization-aware fine-tuning; 0 leaves the run's policy in float32.
        agreement: share of held-out rows that must keep their greedy action.
    """

    fine_tune: Int(0, 2**30) = 0
    agreement: Float(0, 1) = 0.99
