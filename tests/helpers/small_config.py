"""A config for a very short run."""

PARTS = """
model: {name: char_gpt, context: 16, width: 8, heads: 2, layers: 1}
data: {name: stdlib_text, context: 16, batch_size: 2, max_bytes: 60000}
optimizer: {name: sgd, lr: 1e-2}
trainer: {max_steps: 2, validate_every: null, sanity_batches: 0}
"""


def config_with(hook: str) -> str:
    """Return the config as text, with one lifecycle hook."""
    return f"{PARTS}hooks:\n  lifecycle: [{hook}]\n"
