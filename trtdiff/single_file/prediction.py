"""What a network predicts, noise or velocity: the only thing of a model that no name or shape tells.

Sources, first that speaks wins: what the user says; the empty tensors `v_pred` and `ztsnr` that tools write into files
of models trained so; `modelspec.prediction_type` (or `predict_key`) in the metadata; what most models of the kind do.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from trtdiff.single_file.published import PUBLISHED, ZERO_SNR

PREDICTIONS = ("epsilon", "v_prediction")
_WORDS = {"epsilon": "epsilon", "eps": "epsilon", "v": "v_prediction", "v_prediction": "v_prediction"}


def kind_and_scheduler(
    kind: str, names: Iterable[str], metadata: Mapping[str, str], asked: str | None
) -> tuple[str, dict[str, Any], str]:
    """Give the kind of model, its scheduler's config, and a note that says what was found or assumed.

    Stable Diffusion 2 is two models that differ in nothing a file shows: one predicts velocity at 768 pixels, its
    base noise at 512. Without a word about it, it is taken for the first, as diffusers does.
    """
    prediction, source = _prediction(kind, set(names), metadata, asked)
    if kind == "sd2" and prediction == "epsilon":
        kind = "sd2-base"
    scheduler = {**PUBLISHED[kind].configs["scheduler"], "prediction_type": prediction}
    zero_snr = "ztsnr" in set(names)
    if zero_snr:
        if scheduler["_class_name"] == "EulerDiscreteScheduler":
            scheduler |= {name: value for name, value in ZERO_SNR.items() if name != "_class_name"}
        else:
            scheduler = {name: value for name, value in scheduler.items() if name != "skip_prk_steps"} | ZERO_SNR
    ends = ", trained down to a signal of zero (tensor ztsnr)" if zero_snr else ""
    note = f"scheduler: {scheduler['_class_name']}, {prediction} ({source}){ends}"
    return kind, scheduler, note


def _prediction(kind: str, names: set[str], metadata: Mapping[str, str], asked: str | None) -> tuple[str, str]:
    """Give what is predicted, and who says so."""
    if asked is not None:
        return asked, "as asked for"
    if "v_pred" in names:
        return "v_prediction", "tensor v_pred"
    for field in ("modelspec.prediction_type", "modelspec.predict_key"):
        if metadata.get(field) in _WORDS:
            return _WORDS[metadata[field]], field
    usual: str = PUBLISHED[kind].configs["scheduler"]["prediction_type"]
    other = next(word for word in PREDICTIONS if word != usual)
    return usual, f"assumed, the file does not say; --prediction {other} where pictures are noise"
