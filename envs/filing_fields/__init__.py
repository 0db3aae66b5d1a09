"""Domain `filing_fields`: fields of a short financial table or note, handed in as JSON numbers in full units."""

from envs.filing_fields.env import FilingFieldsEnv
from envs.filing_fields.generate import generate
from envs.filing_fields.kinds import KINDS
from postrl.contracts import Domain

DOMAIN = Domain("filing_fields", tuple(KINDS), generate, lambda sandboxes: FilingFieldsEnv(sandboxes=sandboxes))

__all__ = ["DOMAIN", "KINDS", "FilingFieldsEnv", "generate"]
