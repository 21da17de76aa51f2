"""MXFP4, the 4-bit form in which gpt-oss publishes its experts.

32 numbers share one power of two: 16 bytes of two 4-bit floats each, and one byte of exponent.
OCP Microscaling Formats v1.0, https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
"""

import numpy as np

BLOCK = 32  # numbers that share an exponent
_EXPONENT_BIAS = 127
_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_VALUES = np.concatenate([_MAGNITUDES, -_MAGNITUDES])  # the fourth bit is the sign


def dequantise(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Numbers of experts' matrices, turned the way that they multiply rows.

    Args:
      blocks: uint8[E, out, in / 32, 16], the earlier number of two in the low half of a byte.
      scales: uint8[E, out, in / 32] exponents, 127 for 1.

    Returns:
      float32[E, in, out].
    """
    halves = np.stack([blocks & 0x0F, blocks >> 4], axis=-1).reshape(*scales.shape, BLOCK)
    exponents = scales.astype(np.int32) - _EXPONENT_BIAS
    numbers = np.ldexp(_VALUES[halves], exponents[..., None])
    return np.swapaxes(numbers.reshape(*scales.shape[:-1], -1), 1, 2)
