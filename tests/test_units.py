"""Units: quantities parse, and what is formatted parses back."""

import re

import pytest
from hypothesis import given, strategies as st

from windlass.errors import RequestError
from windlass.units import (
    format_bytes,
    format_count,
    format_flop,
    format_flop_rate,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_flop_rate,
    parse_rate,
    parse_seconds,
)


def test_capacities_use_powers_of_2_and_vendor_units_powers_of_10():
    assert parse_bytes("16 GiB") == 16 * 2**30
    assert parse_bytes("16GB") == 16 * 10**9
    assert parse_rate("900 GB/s") == 9e11
    assert parse_flop_rate("312 TFLOP/s") == 3.12e14
    assert parse_seconds("3 h") == 10_800


@given(count=st.integers(0, 2**53))
def test_a_plain_number_is_in_the_base_unit(count: int):
    assert parse_bytes(count) == parse_bytes(str(count)) == parse_bytes(f"{count:_} B") == count


@pytest.mark.parametrize(
    "value",
    [
        "", "GiB", "-1 GiB", "16 GiBs", "1 2 B", "1__0", "16_ GiB", "1 GB/s", "1e999", "nan",
        True, None, [1], -1, float("inf"),
    ],
)  # fmt: skip
def test_an_invalid_size_is_refused_with_an_example(value: object):
    with pytest.raises(RequestError, match="16 GiB"):
        parse_bytes(value)


@given(count=st.integers(0, 2**60))
def test_formatted_bytes_parse_back_within_their_digits(count: int):
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=6e-3)


@given(rate=st.floats(0.1, 1e17))
def test_formatted_rates_parse_back_within_their_digits(rate: float):
    assert parse_rate(format_rate(rate)) == pytest.approx(rate, rel=6e-3)
    assert parse_flop_rate(format_flop_rate(rate)) == pytest.approx(rate, rel=6e-3)


@given(seconds=st.floats(1e-9, 59))
def test_a_formatted_time_below_a_minute_parses_back_within_its_digits(seconds: float):
    assert parse_seconds(format_seconds(seconds)) == pytest.approx(seconds, rel=6e-3)


@given(number=st.floats(1, 9.9e14))
def test_no_formatted_number_reaches_a_thousand(number: float):
    for shown in (format_rate(number), format_flop(number), format_count(round(number))):
        assert re.match(r"[0-9.]{1,4} |[0-9]{1,3}$", shown), shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0 s"), (1e-12, "0 s"), (0.041, "41.0 ms"), (0.9999, "1.00 s"), (75, "1 min 15 s"),
        (11_520, "3 h 12 min"), (90_000, "1 d 1 h"), (2 * 86_400 - 60, "2 d 0 h"),
    ],
)  # fmt: skip
def test_a_time_is_formatted_as_a_person_would_say_it(seconds: float, shown: str):
    assert format_seconds(seconds) == shown


@pytest.mark.parametrize(
    ("count", "shown"), [(988.946, "989"), (12.3456, "12.3"), (7, "7"), (0, "0"), (2e3, "2.00 k")]
)
def test_a_count_has_at_most_three_digits(count: float, shown: str):
    assert format_count(count) == shown


def test_a_value_that_rounds_to_a_larger_unit_is_formatted_in_it():
    assert format_bytes(2**20 - 1) == "1.00 MiB"
    assert format_rate(9.999e11) == "1.00 TB/s"
    assert format_count(999_999) == "1.00 M"


@pytest.mark.parametrize(
    ("rate", "shown"),
    [(0.125, "0.125 B/s"), (0.09996, "0.100 B/s"), (0, "0.00 B/s"), (9.996, "10.0 B/s")],
)
def test_a_rate_below_one_has_three_digits_too(rate: float, shown: str):
    assert format_rate(rate) == shown
