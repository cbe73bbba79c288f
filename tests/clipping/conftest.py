"""What several files of this folder need."""

import pytest
import torch


@pytest.fixture
def in_double():
    """Ordinary tensors and layers are in float64: pytestmark = pytest.mark.usefixtures("in_double")."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
