"""Promises about the description of the API."""

from served_record import Served
from starlette.routing import Route

from windlass.judging.differences.run_diff import diff
from windlass.judging.verdicts import judge
from windlass.record import Catalog
from windlass.server import Access, Analyses, RecordServer, make_token


def test_the_description_has_exactly_the_paths_that_are_answered(served: Served) -> None:
    described = served.ask("/api/openapi.json")
    with Catalog.open(served.root) as catalog:
        analyses = Analyses(diff=lambda _: diff(), judge=judge)
        server = RecordServer(served.root, catalog, Access(token=make_token()), analyses)
    answered = {
        (route.path.replace(":path}", "}"), method.lower())
        for route in server.routes
        if isinstance(route, Route) and route.path.startswith("/api/")
        for method in route.methods or ()
        if method != "HEAD"
    }
    paths = described["paths"].items()
    assert {(path, method) for path, methods in paths for method in methods} == answered


def test_each_parameter_of_a_path_is_described(served: Served) -> None:
    for path, methods in served.ask("/api/openapi.json")["paths"].items():
        for operation in methods.values():
            names = [one["name"] for one in operation["parameters"] if one["in"] == "path"]
            assert names == [part[1:-1] for part in path.split("/") if part.startswith("{")]
