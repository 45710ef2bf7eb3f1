"""The pipelines that `kedro run --pipelines` knows."""

from kedro.pipeline import Pipeline

from ppo_rlhf.pipelines import (
    audit_reward,
    collect_feedback,
    critic_pretraining,
    data_preparation,
    evaluation,
    human_evaluation,
    kl_study,
    ppo,
    reporting,
    reward_modelling,
    supervised_finetuning,
    sweep,
)

STAGES = (data_preparation, supervised_finetuning, reward_modelling, ppo, evaluation, reporting)
BESIDE = (critic_pretraining, audit_reward, kl_study, sweep, collect_feedback, human_evaluation)
ALIGN = ("ppo", "evaluation", "reporting")


def register_pipelines() -> dict[str, Pipeline]:
    """Return each stage, `align` (for models of one's own) and `__default__`, the whole chain; and what is beside it.

    The stage `evaluation` is registered with its report.
    Kedro's `find_pipelines` is not used: with `--pipelines align` it looks for a folder of that name alone, and
    finds nothing.
    """
    stages, others = (
        {stage.__name__.rpartition(".")[2]: stage.create_pipeline() for stage in each} for each in (STAGES, BESIDE)
    )
    align = Pipeline([stages[name] for name in ALIGN])
    evaluation = {"evaluation": stages["evaluation"] + stages["reporting"]}
    return {**stages, **others, **evaluation, "align": align, "__default__": Pipeline(list(stages.values()))}
