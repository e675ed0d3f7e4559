"""The embedded demo job (a small character GPT), and the tables of built-in models, data, optimizers and losses.

Each line names a factory, which is imported when a config uses it. Models and data are created with their parameters;
an optimizer gets the model's parameters first, and a scheduler the optimizer; a loss factory creates the loss function.
The table of built-in hooks is in `hooks/__init__.py`. `cli` may import this folder.
"""

MODELS: dict[str, str] = {
    "char_gpt": "hookline.demo.char_gpt:CharGPT",
}

DATA: dict[str, str] = {
    "stdlib_text": "hookline.demo.stdlib_text:stdlib_text",
}

OPTIMIZERS: dict[str, str] = {
    "adagrad": "torch.optim:Adagrad",
    "adam": "torch.optim:Adam",
    "adamw": "torch.optim:AdamW",
    "rmsprop": "torch.optim:RMSprop",
    "sgd": "torch.optim:SGD",
}

SCHEDULERS: dict[str, str] = {
    "constant": "hookline.demo.lr_schedules:constant",
    "cosine": "torch.optim.lr_scheduler:CosineAnnealingLR",
    "exponential": "torch.optim.lr_scheduler:ExponentialLR",
    "linear": "torch.optim.lr_scheduler:LinearLR",
    "multistep": "torch.optim.lr_scheduler:MultiStepLR",
    "one_cycle": "torch.optim.lr_scheduler:OneCycleLR",
    "plateau": "torch.optim.lr_scheduler:ReduceLROnPlateau",
    "step": "torch.optim.lr_scheduler:StepLR",
    "warmup_cosine": "hookline.demo.lr_schedules:warmup_cosine",
}

LOSSES: dict[str, str] = {
    "bce_with_logits": "torch.nn:BCEWithLogitsLoss",
    "cross_entropy": "torch.nn:CrossEntropyLoss",
    "huber": "torch.nn:HuberLoss",
    "l1": "torch.nn:L1Loss",
    "mse": "torch.nn:MSELoss",
    "nll": "torch.nn:NLLLoss",
    "smooth_l1": "torch.nn:SmoothL1Loss",
}
