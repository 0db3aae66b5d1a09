"""Domain `code_repair`: a small Python file with one fault, tests that show it, hidden tests that decide."""

from envs.code_repair.env import CodeRepairEnv
from envs.code_repair.generate import generate
from envs.code_repair.template import KINDS
from postrl.contracts import Domain

DOMAIN = Domain("code_repair", KINDS, generate, lambda sandboxes: CodeRepairEnv(sandboxes=sandboxes))

__all__ = ["DOMAIN", "KINDS", "CodeRepairEnv", "generate"]
