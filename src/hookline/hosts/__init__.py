"""Runs in loops that are not ours: a user's own, Lightning's, the HF Trainer's, Ignite's, or an unedited script's."""
