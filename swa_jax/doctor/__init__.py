"""What `swa-jax doctor` looks at: versions, devices, extras, a program that must keep the laws."""
