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
    """Return the pipelines by name.

    The pipelines are the stages, the pipelines outside the chain, `align` (for a user's own models) and `__default__`
    (the whole chain). The pipeline `evaluation` includes its report. Kedro's `find_pipelines` is not used: with
    `--pipelines align` it would look only for a folder named align, and find none.
    """
    stages, beside = (
        {stage.__name__.rpartition(".")[2]: stage.create_pipeline() for stage in each} for each in (STAGES, BESIDE)
    )
    align = Pipeline([stages[name] for name in ALIGN])
    evaluation = {"evaluation": stages["evaluation"] + stages["reporting"]}
    return {**stages, **beside, **evaluation, "align": align, "__default__": Pipeline(list(stages.values()))}
