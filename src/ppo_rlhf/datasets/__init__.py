"""Kedro datasets of this project that the package kedro-datasets lacks."""

from ppo_rlhf.datasets.checkpoints import (
    CheckpointDataset,
    CompletionsDataset,
    EvaluationLogDataset,
    ResumeCheckpointDataset,
)
from ppo_rlhf.datasets.pair_tables import PairTablesDataset
from ppo_rlhf.datasets.pretrained_model import PretrainedModelDataset
from ppo_rlhf.datasets.records_dataset import RecordsDataset, ReferenceTextsDataset
from ppo_rlhf.datasets.report_files import (
    ModelCardDataset,
    OptionalJSONDataset,
    TokenSamplesDataset,
    TrainingCurvesDataset,
)
from ppo_rlhf.datasets.tables import (
    OptionalTableDataset,
    SpreadsheetDataset,
    TableDataset,
    TrainingHistoryDataset,
    TrainingPromptsDataset,
)

__all__ = [
    "CheckpointDataset",
    "CompletionsDataset",
    "EvaluationLogDataset",
    "ModelCardDataset",
    "OptionalJSONDataset",
    "OptionalTableDataset",
    "PairTablesDataset",
    "PretrainedModelDataset",
    "RecordsDataset",
    "ReferenceTextsDataset",
    "ResumeCheckpointDataset",
    "SpreadsheetDataset",
    "TableDataset",
    "TokenSamplesDataset",
    "TrainingCurvesDataset",
    "TrainingHistoryDataset",
    "TrainingPromptsDataset",
]
