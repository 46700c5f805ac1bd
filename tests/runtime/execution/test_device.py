"""What a device refuses when it is opened."""

from __future__ import annotations

import pytest
import torch

from runtime.config import RunnerConfig
from runtime.errors import ConfigError
from runtime.execution.device import open_device


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"cpu_kernels": "torch"}, "native CPU kernels"),
    ],
)
def test_quantization_needs_kernels_that_have_it(options, named):
    config = RunnerConfig(device="cpu", quantization="int8", **options)
    with pytest.raises(ConfigError, match=named):
        open_device(config, torch.bfloat16, lambda _: None)
