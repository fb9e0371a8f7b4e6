"""Who computes attention over pages. One folder a provider; `step.attention_step` is the only caller of kernels."""
