"""How near real gradients come to their proved bounds, layer by layer: where the noise is well spent, and where it is wasted.

>>> import torch, lipdp
>>> from lipdp import losses, nn
>>> from lipdp.diagnose import diagnose
>>> model = nn.Sequential(nn.BoundedInput((8,), mode="sphere"), nn.SpectralLinear(8, 4, bias=False))
>>> batch = torch.randn(32, 8), torch.arange(32) % 4
>>> diagnosis = diagnose(model, losses.MulticlassKR(), batch, public=True)
>>> round(diagnosis["1.weight"].tightness, 3)
1.0

Nothing here is private: it shows true gradients of the examples that it is given. Use public data (and say ``public=True``), or
keep what it says to yourself.
"""

from lipdp.diagnose.diagnosis import Diagnosis, DiagnosisCallback, ParameterDiagnosis, diagnose
from lipdp.diagnose.norms import Measured, measure_gradients

__all__ = ["Diagnosis", "DiagnosisCallback", "Measured", "ParameterDiagnosis", "diagnose", "measure_gradients"]
