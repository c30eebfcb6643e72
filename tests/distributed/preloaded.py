"""What every process of these tests needs, imported and made once: PyG writes code for each class
of layers when that is first instantiated."""
from __future__ import annotations

import torch._dynamo
import torch.nn.parallel  # noqa: F401

import gnnaccel.adapters.pyg.distributed.running  # noqa: F401
from tests.distributed import models

for _name in models.NAMES:
    models.make(_name)
