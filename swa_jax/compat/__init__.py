"""Class interfaces of serving engines that exist, as thin shells over the pure core.

Import the one you need: `swa_jax.compat.sgl_jax`, `swa_jax.compat.sglang`, `swa_jax.compat.vllm`,
`swa_jax.compat.levanter`. This package imports none of them itself.
"""
