"""A trained model, and how it is saved."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.models.critic import BIAS, WEIGHT
from ppo_rlhf.models.directories import ADAPTER_CONFIG, AVERAGE, CARD, CONFIG, RECORD, follow_umask
from ppo_rlhf.models.older_readers import add_older_names
from ppo_rlhf.models.origins import Origin, write_origins
from ppo_rlhf.runtime.log_lines import quiet_transformers

log = logging.getLogger(__name__)

# Maximum size of a weights file: the hub recommends 5 GB, and an interrupted upload repeats only one file
SHARD = "5GB"


@dataclass
class TrainedModel:
    """A model with its tokenizer and companion files, as the model dataset saves it."""

    model: PreTrainedModel  # plain transformers model, or a model with an adapter, of which only the adapter is saved
    tokenizer: PreTrainedTokenizerBase
    # Value head on the last hidden states, saved among the weights under TRL's names `v_head.*`
    value_head: nn.Linear | None = None
    # The model with the moving average of the weights, saved in the folder `ema`
    average: PreTrainedModel | None = None
    card: str | None = None  # the text of the model card, README.md
    # Replaces the generation configuration of `model` in the saved folder
    generation_config: GenerationConfig | None = None
    record: str | None = None  # the text of ppo_rlhf.json, the record of how the model was trained
    made_from: tuple[Origin, ...] = ()  # the models and tables that the model was trained from, for made_from.json

    def save(self, folder: Path) -> None:
        """Write a model directory: configuration, safetensors and tokenizer; the weight average gets a subfolder `ema`.

        Raises:
            ModelError: The folder is a file, or the folder holds a whole model and an adapter is to be saved, or the
                folder holds an adapter and a whole model is to be saved.
        """
        only_adapter = "save_pretrained" in vars(self.model)
        other = CONFIG if only_adapter else ADAPTER_CONFIG
        if folder.is_file():
            raise ModelError(f"{folder} is a file; give a folder to save the model in.")
        # transformers would load a full model and apply an adapter that lies in the same folder, even an old adapter
        if (folder / other).is_file():
            raise ModelError(
                f"{folder} holds {other} of another model; loading the folder would mix the two. Give another folder."
            )
        options: dict[str, Any] = {} if only_adapter else {"max_shard_size": SHARD}
        if (head := self.value_head) is not None:
            options["state_dict"] = self.model.state_dict() | {WEIGHT: head.weight.detach(), BIAS: head.bias.detach()}
        with quiet_transformers():
            self.model.save_pretrained(folder, **options)
            self.tokenizer.save_pretrained(folder)
        add_older_names(folder)
        if self.generation_config is not None:
            self.generation_config.save_pretrained(folder)
        if self.record is not None:
            (folder / RECORD).write_text(self.record, encoding="utf-8")
        write_origins(folder, self.made_from)
        if self.card is not None:
            (folder / CARD).write_text(self.card, encoding="utf-8")
        follow_umask(folder)
        if self.average is not None:
            replace(self, model=self.average, value_head=None, average=None, card=None).save(folder / AVERAGE)
        elif (folder / AVERAGE / CONFIG).is_file():
            log.warning("%s is the average of an earlier model; the model saved now has no average.", folder / AVERAGE)
