"""Parameters that built-in hooks have no default for, for a model of 4 features, 8 in the middle and 1 output."""

from typing import Any

NEEDED: dict[str, dict[str, Any]] = {
    "notify": {"webhook_url": "https://hooks.example.org/x", "notify_on": []},
    "clip_norm": {"max_norm": 0.5},
    "clip_value": {"max_value": 0.01},
    "freeze": {"params": "0.*"},
    "mask": {"params": "0.*"},
    "scale": {"factor": 0.5},
    "wandb": {"mode": "offline", "system_metrics": False},
    "ablate": {"modules": "1", "units": [0]},
    "add_activation": {"modules": "1", "value": 0.5},
    "replace_activation": {"modules": "1", "value": [0.5]},
    "scale_activation": {"modules": "1", "factor": 0.5},
    "steer": {"modules": "1", "vector": [1.0] * 8, "strength": 0.1},
    "patch": {"modules": "1", "source": "states.safetensors"},
}
