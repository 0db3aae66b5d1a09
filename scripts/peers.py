"""The default base as Hugging Face `transformers` loads it, and prompts for both sides of a comparison (extra `peers`).

The same GGUF file, dequantised to float32 by both loaders: tests/test_parity.py holds them to the same logits.
Shapes: N tokens of the vocabulary.
"""

from __future__ import annotations

import copy
import os
import re
from typing import Any

import numpy as np

from postrl.policy.chat import ChatFormat
from postrl.policy.gguf_file import smollm2_path

INSTALL = "this comparison needs the extra `peers`: pip install -e .[peers] (torch's CPU build is enough)"


def transformers_model(num_threads: int) -> Any:
    """A `LlamaForCausalLM` of the default base, float32, in evaluation mode; torch uses `num_threads` threads.

    ValueError, with the command, when the extra is not installed.
    """
    # Both models lie on this disk: nothing is to be asked of a hub.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TQDM_DISABLE"] = "1"
    try:
        import torch  # pyright: ignore[reportMissingImports]
        import transformers  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(INSTALL) from error
    torch.set_num_threads(num_threads)
    path = smollm2_path()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    # Loaded weights are plain float32, but the model stays marked as quantised, which trainers refuse; a fresh one isn't.
    config = copy.deepcopy(loaded.config)
    del config.quantization_config
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    return model.eval()


def word_ids(chat: ChatFormat) -> np.ndarray:
    """int32 [N]: frequent words, or beginnings of words, each with a leading space; for texts of known length.

    The vocabulary is in order of merging, so that low ids are frequent; byte-level BPE writes a space as `Ġ`.
    """
    vocabulary = chat.tokenizer.get_vocab()
    frequent = sorted((i, token) for token, i in vocabulary.items() if i < 5000)
    return np.array([i for i, token in frequent if re.fullmatch("Ġ[a-z]{4,8}", token)], np.int32)
