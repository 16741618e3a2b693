"""The chart's templates are the union of the variants of an object."""

import pytest
from deploy_chart import (
    CPU,
    GPU,
    VARIANTS,
    Parameter,
    Place,
    Templates,
    condition_of,
    merged_order,
    parse_parameters,
)
from deploy_objects import Variant

KEDA = Variant(features=frozenset({"keda"}))
AMONG = (CPU, GPU, KEDA)


def config_map(**data):
    return {"kind": "ConfigMap", "metadata": {"name": "a"}, "data": data}


def template(versions, *parameters):
    return Templates(parameters).object(versions, AMONG)


def test_what_all_variants_have_stands_without_condition():
    text = template(dict.fromkeys(AMONG, config_map(key="one")))
    assert "{{" not in text
    assert '  key: "one"' in text


def test_what_differs_stands_under_its_condition():
    text = template({CPU: config_map(key="one"), GPU: config_map(key="two"), KEDA: config_map()})
    assert "{{- if not .Values.keda.enabled }}" in text
    cpu = text.index('{{- if eq .Values.device "cpu" }}')
    assert cpu < text.index('"one"') < text.index('{{- if eq .Values.device "gpu" }}')


def test_an_object_of_one_variant_is_under_a_condition_as_a_whole():
    text = template({KEDA: config_map(key="one")})
    assert text.startswith("{{- if .Values.keda.enabled }}\n---")
    assert text.endswith("{{- end }}\n")


def test_variants_that_no_value_tells_apart_are_refused():
    with pytest.raises(ValueError, match="no value of the chart"):
        condition_of([GPU, KEDA], [CPU, GPU, KEDA, Variant(etcd=False)])


def test_every_variant_has_a_condition_of_its_own_or_is_the_default():
    for variant in VARIANTS:
        single = len(variant.features) + (not variant.etcd) + (variant.device != "cpu") == 1
        assert variant == CPU or not single or condition_of([variant], [CPU, variant])


def test_a_parameter_takes_its_default_from_the_manifest():
    parameter = Parameter("x.size", "", {"type": "string"}, [Place("ConfigMap/a:data.key")])
    templates = Templates([parameter])
    text = templates.object({CPU: config_map(key="one"), GPU: config_map(key="two")}, (CPU, GPU))
    assert "key: {{ toJson .Values.x.size }}" in text
    assert templates.defaults(CPU) == {"x.size": "one"}
    assert templates.defaults(GPU) == {"x.size": "two"}


def test_a_parameter_without_a_field_is_refused():
    templates = Templates(
        [Parameter("x", "", {"type": "string"}, [Place("ConfigMap/a:data.nokey")])]
    )
    templates.object(dict.fromkeys(AMONG, config_map(key="one")), AMONG)
    with pytest.raises(ValueError, match="x names no field"):
        templates.defaults(CPU)


def test_places_of_one_parameter_must_agree():
    places = [Place("ConfigMap/a:data.one"), Place("ConfigMap/a:data.two", prefix="/m/")]
    templates = Templates([Parameter("x", "", {"type": "string"}, places)])
    templates.object(dict.fromkeys(AMONG, config_map(one="n", two="/m/n")), AMONG)
    with pytest.raises(ValueError, match="x is n and other"):
        templates.object(dict.fromkeys(AMONG, config_map(one="n", two="/m/other")), AMONG)


def test_a_number_in_a_text_field_is_written_as_text():
    place = Place("ConfigMap/a:data.key")
    assert place.value_of("30", "integer") == 30
    assert place.expression(".Values.x", "30", "integer") == "{{ toString .Values.x | toJson }}"
    later = Place("Deployment/a:spec.grace", plus=20)
    assert later.value_of(50, "integer") == 30
    assert later.expression(".Values.x", 50, "integer") == "{{ add 20 .Values.x }}"


def test_an_optional_field_that_no_manifest_has_is_added_when_given():
    place = Place("ConfigMap/a:metadata.annotations")
    parameter = Parameter("notes", "", {"type": "object"}, [place], optional=True)
    templates = Templates([parameter])
    text = templates.object(dict.fromkeys(AMONG, config_map(key="one")), AMONG)
    assert "{{- with .Values.notes }}\n  annotations: {{ toJson . }}\n{{- end }}" in text
    assert templates.defaults(CPU) == {"notes": {}}


def test_templates_of_others_are_not_rendered():
    text = template(dict.fromkeys(AMONG, config_map(key="{{ $labels.x }}")))
    assert '{{ toJson "{{ $labels.x }}" }}' in text


def test_orders_are_merged():
    assert merged_order([["a", "b", "c"], ["a", "x", "b"], ["y", "c", "z"]]) == [
        *("y", "a", "x", "b", "c", "z")
    ]


def test_one_row_stands_for_several_services():
    row = {
        "value": "SERVICE.replicas",
        "each": ["gateway", "worker"],
        "help": "Pods of the SERVICE.",
        "schema": {"type": "integer"},
        "at": "Deployment/tideserve-SERVICE:spec.replicas",
    }
    first, second = parse_parameters([row])
    assert (first.value, second.help) == ("gateway.replicas", "Pods of the worker.")
    assert second.places == [Place("Deployment/tideserve-worker:spec.replicas")]
