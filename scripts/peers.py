"""The default base as Hugging Face `transformers` loads it, and prompts for both sides of a comparison (extra `peers`).

The same GGUF file, dequantised to float32 by both loaders: tests/test_parity.py holds them to the same logits.
Shapes: T tokens.
"""

from __future__ import annotations

import os
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
        import torch
        import transformers
    except ImportError as error:
        raise ValueError(INSTALL) from error
    torch.set_num_threads(num_threads)
    path = smollm2_path()
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval()


_WORDS = (
    "account answer area bank base board book box budget car case change child city class code color company cost country "
    "course data day debt dog door earth end energy error event eye face fact family father field file film fire food foot "
    "form friend game garden girl glass gold group hand head heart history home horse hour house idea income interest island "
    "job key king land language law letter level life light line list market meeting member mind minute money month morning "
    "mother mountain music name nature news night number office order page paper parent part party people person picture "
    "place plan plant point power price problem product profit question rain rate reason report result river road room "
    "school science sea second service shape ship side sister size sky snow song sound space star state stone story street "
    "student summer sun system table tax teacher team test thing time town tree truth value voice wall war water way week "
    "white wife wind window winter wood word work world year"
).split()


def words_T(chat: ChatFormat, num_tokens: int, rng: np.random.Generator) -> np.ndarray:
    """int32 [T]: `num_tokens` random words, each one token with its leading space, so that lengths are exact."""
    ids = [chat.tokenizer.encode(f" {word}", add_special_tokens=False).ids for word in _WORDS]
    return rng.choice(np.array([i for [i, *rest] in ids if not rest], np.int32), num_tokens)
