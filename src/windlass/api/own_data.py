"""The data that a model brings where a request leaves them open: its tokenizer, or its images."""

from windlass.api.objects import IN_MEMORY
from windlass.errors import RequestError
from windlass.models import is_huggingface, tokenizer_file
from windlass.schema import DataRequest, ExampleShape, Graph, ResolvedRequest

_IMAGE_SHAPE = ("channels", "height", "width")
_DIGITS = "digits"
"""The images that a model of images is trained on by default."""


def with_own_data(request: ResolvedRequest, graph: Graph) -> ResolvedRequest:
    """The request with data that its model can take, as far as it leaves them open.

    A Hugging Face model has a tokenizer of its own. A model of images is trained on images of its
    shape, by default scikit-learn's digits.
    """
    name, data = request.model.name, request.data
    if graph.examples is not None:
        return request.model_copy(update={"data": _with_own_images(data, graph.examples)})
    if not is_huggingface(name) or "tokenizer" in data.model_fields_set:
        return request
    file = tokenizer_file(name)
    if file is None:
        return request
    data = data.model_copy(update={"tokenizer": str(file)})
    return request.model_copy(update={"data": data})


def _with_own_images(data: DataRequest, examples: ExampleShape) -> DataRequest:
    """The request for images of a model's shape.

    Raises:
        RequestError: text is asked for.
    """
    if data.source == IN_MEMORY or len(examples.inputs) != len(_IMAGE_SHAPE):
        return data
    given = data.model_fields_set
    if "format" in given and data.format != "images":
        raise RequestError(
            f"`data.format` = {data.format}, and the model takes images; leave it out, or set "
            "`data.format=images`"
        )
    own: dict[str, object] = {"format": "images"}
    if "source" not in given:
        own["source"] = _DIGITS
    if data.image_shape is None:
        own["image_shape"] = examples.inputs
    return DataRequest.model_validate(data.model_dump(include=given) | own)
