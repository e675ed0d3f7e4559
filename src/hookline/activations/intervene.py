"""Moved to `hookline.activations.interventions`."""

from hookline.activations.interventions import Ablate as Ablate
from hookline.activations.interventions import Add as Add
from hookline.activations.interventions import Intervention as Intervention
from hookline.activations.interventions import Patch as Patch
from hookline.activations.interventions import Replace as Replace
from hookline.activations.interventions import Scale as Scale
from hookline.activations.interventions import Steer as Steer
