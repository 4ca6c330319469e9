"""T5's tokenizer from SentencePiece's own file, `spiece.model`, as many checkpoints store nothing else.

The file is a protobuf message: the pieces with their scores, and a table of characters to replace. Everything around
them is the same for every T5 (transformers' `T5Tokenizer`): words are split at blanks, each begins with `▁`, and the
end token stands behind the text. The sentencepiece library is not needed, only the message's definition, which
transformers carries.
"""

from pathlib import Path
from typing import Any

from trtdiff.errors import CheckpointError, MissingDependency
from trtdiff.export.layout import DAMAGED

UNIGRAM, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Numbers of sentencepiece_model.proto: the type of a model, and three types of pieces."""
SENTINELS = 100
"""Tokens `<extra_id_99>` … `<extra_id_0>` behind the pieces, T5's masks in training; the paper's number."""


def t5_tokenizer_json(file: Path) -> bytes:
    """Give the tokenizer of a spiece.model in tokenizers' own format.

    Raises CheckpointError where the file is damaged or of another kind of model, MissingDependency without protobuf.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    message = _read(file)
    pieces = [(piece.piece, piece.score) for piece in message.pieces]
    trained, end = message.trainer_spec, message.trainer_spec.eos_piece
    unknown = [place for place, piece in enumerate(message.pieces) if piece.type == UNKNOWN]
    if trained.model_type != UNIGRAM or end not in dict(pieces) or unknown != [trained.unk_id]:
        raise CheckpointError(
            f"{file.name} is not a T5 tokenizer: no Unigram model with an unknown piece and the end token {end!r}",
            where=str(file),
            hint=f"{DAMAGED}; or give a checkpoint whose tokenizer is stored as tokenizer.json",
        )
    blank: dict[str, Any] = {"replacement": "▁", "prepend_scheme": "always", "split": True}
    try:
        made = Tokenizer(models.Unigram(pieces, trained.unk_id, byte_fallback=False))
        if message.normalizer_spec.precompiled_charsmap:
            made.normalizer = normalizers.Precompiled(message.normalizer_spec.precompiled_charsmap)
    except Exception as error:  # noqa: BLE001 - tokenizers raises bare Exception
        raise CheckpointError(
            f"{file.name} cannot be made into a tokenizer: {error}", where=str(file), hint=DAMAGED
        ) from None
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(**blank)])
    made.decoder = decoders.Metaspace(**blank)
    special = [piece.piece for piece in message.pieces if piece.type in {UNKNOWN, CONTROL}]
    made.add_special_tokens(special + [f"<extra_id_{number}>" for number in reversed(range(SENTINELS))])
    made.add_tokens([AddedToken(p.piece, normalized=False) for p in message.pieces if p.type == USER_DEFINED])
    made.post_processor = processors.TemplateProcessing(
        single=["$A", end], pair=["$A", end, "$B", end], special_tokens=[(end, made.token_to_id(end))]
    )
    text: str = made.to_str()
    return text.encode()


def _read(file: Path) -> Any:
    """Read the message; its fields are those of sentencepiece_model.proto."""
    try:
        from transformers.convert_slow_tokenizer import import_protobuf

        definitions: Any = import_protobuf()  # type: ignore[no-untyped-call]
    except ImportError:
        raise MissingDependency(
            "reading spiece.model needs transformers and protobuf",
            where=str(file),
            hint="pip install 'trtdiff[compile]' protobuf",
        ) from None
    message = definitions.ModelProto()
    try:
        message.ParseFromString(file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot read {file.name}: {error.strerror}", where=str(file), hint=DAMAGED) from None
    except Exception as error:  # noqa: BLE001 - protobuf's DecodeError, which must not be imported to be named
        raise CheckpointError(f"{file.name} is damaged: {error}", where=str(file), hint=DAMAGED) from None
    return message
