"""The head of new classes, which is trained whole beside adapters."""

from windlass.jobs.objects import NO_OBJECTS, model_arguments
from windlass.models import apply_model_arguments, has_config, model_config
from windlass.schema import ModelIdentity, Request


def with_trained_head(request: Request) -> Request:
    """The request, which says of adapters beside a drawn head of classes that this is trained.

    An adapter changes what a layer has learned, and a head that was just drawn has learned nothing.

    Raises:
        ModelError: there is no such model.
        InputErrors: every tensor of its folder that does not fit.
    """
    lora, name = request.lora, request.model.name
    if lora is None or lora.trained is not None or lora.base is not None or not has_config(name):
        return request
    model = ModelIdentity.model_validate(request.model.model_dump())
    config = apply_model_arguments(model_config(name), model_arguments(model))
    if config.image is None and config.text_classes is None:
        return request
    stack = NO_OBJECTS.stack(model, seed=None)
    head, layer = stack.names[-1], stack.layers[-1]
    stored = frozenset[str]() if stack.weights is None else stack.weights.parameters
    names = (f"{head}.{path}" for path, _ in layer.named_parameters())
    drawn = tuple(name for name in names if name not in stored)
    update = {"lora": lora.model_copy(update={"trained": drawn or None})}
    return request.model_copy(update=update)
