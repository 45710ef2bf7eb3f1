"""Classes of transformers for annotations alone: importing the real ones takes seconds, and no command should wait.

Not under `if TYPE_CHECKING` in each module: Kedro evaluates the annotations of a node to find its typed parameters, and
where one name is missing it validates none of them. `import transformers` itself takes 0.3 s: its modules are
imported when one of their classes is first asked for, as in `transformers.PreTrainedModel`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
else:  # whoever needs the class itself, for isinstance or to make one, takes it from transformers
    GenerationConfig = PretrainedConfig = PreTrainedModel = PreTrainedTokenizerBase = Any

__all__ = ["GenerationConfig", "PreTrainedModel", "PreTrainedTokenizerBase", "PretrainedConfig"]
