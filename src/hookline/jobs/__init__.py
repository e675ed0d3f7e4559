"""The embedded default job, and the parts that a config may name: models, data, optimizers, schedulers, losses.

Each line leads to a factory, which is imported when a config names it. Models are made with their parameters, data
too; an optimizer gets the model's parameters first, a scheduler the optimizer; a loss factory makes the loss function.
"""

MODELS: dict[str, str] = {
    "char_gpt": "hookline.jobs.char_gpt:CharGPT",
}

DATA: dict[str, str] = {
    "stdlib_text": "hookline.jobs.stdlib_text:stdlib_text",
}

OPTIMIZERS: dict[str, str] = {
    "adagrad": "torch.optim:Adagrad",
    "adam": "torch.optim:Adam",
    "adamw": "torch.optim:AdamW",
    "rmsprop": "torch.optim:RMSprop",
    "sgd": "torch.optim:SGD",
}

SCHEDULERS: dict[str, str] = {
    "constant": "hookline.jobs.constant:constant",
    "cosine": "torch.optim.lr_scheduler:CosineAnnealingLR",
    "exponential": "torch.optim.lr_scheduler:ExponentialLR",
    "linear": "torch.optim.lr_scheduler:LinearLR",
    "multistep": "torch.optim.lr_scheduler:MultiStepLR",
    "one_cycle": "torch.optim.lr_scheduler:OneCycleLR",
    "plateau": "torch.optim.lr_scheduler:ReduceLROnPlateau",
    "step": "torch.optim.lr_scheduler:StepLR",
    "warmup_cosine": "hookline.jobs.warmup_cosine:warmup_cosine",
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
