# SPDX-License-Identifier: Apache-2.0
"""Shared inputs and error measures."""

import numpy as np
import pytest


def relative_l2(result, expected) -> float:
    """‖result − expected‖₂ / ‖expected‖₂ in float64, 0 where both are 0."""
    result = np.asarray(result, dtype=np.float64)
    expected = np.asarray(expected, dtype=np.float64)
    assert result.shape == expected.shape
    norm = np.linalg.norm(expected)
    error = np.linalg.norm(result - expected)
    return float(error if norm == 0 else error / norm)


# Relative L2 errors that docs/python.md promises: results in the input's dtype, so a bf16 or f16
# result carries its own rounding (2⁻⁹ or 2⁻¹² a value) besides.
BOUNDS = {"float32": 3e-6, "bfloat16": 4e-3, "float16": 1e-3, "float64": 1e-13}


@pytest.fixture
def rng():
    return np.random.default_rng(20230717)
