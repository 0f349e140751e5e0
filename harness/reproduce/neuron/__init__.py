"""The Neuron MoE guide (004): what we find for each of its claims, and its examples and thresholds drawn again."""

from harness.reproduce.neuron.findings import findings
from harness.reproduce.neuron.tables import tables

__all__ = ["findings", "tables"]
