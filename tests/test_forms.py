"""Every form of a call that the design names works, equal to the canonical one; what is none of them is refused."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_ops import (
    LABEL_RE,
    AttentionConfig,
    AutotunePolicy,
    Autotuner,
    AutotuningResult,
    ConfigCache,
    ConfigError,
    ConfigSelectorChain,
    Entry,
    Executor,
    FwdParams,
    Invocation,
    Kernel,
    Key,
    LabelError,
    LinearConfig,
    NormConfig,
    PersistentCache,
    TuningError,
    UnsupportedError,
    autotune,
    autotune_lowered,
    autotune_recorded,
    benchmark,
    clear_invocations,
    default_executor,
    default_key_builder_with_sharding,
    default_selector,
    device_fingerprint,
    device_kind,
    extract_labels_from_hlo_text,
    find_labels_in_lowered,
    flash_attention,
    from_json,
    get_device_platform,
    get_invocations,
    label,
    labels_to_configs,
    layer_norm,
    linear,
    overlay_cache,
    pmap_with_config,
    policy_override,
    record_invocation,
    rms_norm,
    set_default_selector,
    stable_json,
    to_json,
    vmap_with_config,
)
from ejkernel_ops.core.snapshot import current
from ejkernel_ops.execution.trial import Tuned
from ejkernel_ops.utils.meta import split_label

from .fakes import _sleep
from .ops import close, normal
from .told import KEY, ONE, TOLD, key_of

X = normal(0, 4, 3)
HEX = "0123456789abcdef"
HINT = "expected"  # every error says what would have been right


class Own(Kernel):
    """What the kernels of this file have: a heuristic."""

    def run(self, x, *, cfg):
        return x * cfg

    def heuristic_cfg(self, inv):
        return 1


class Slow(Own):
    """Takes as many milliseconds as its config says."""

    name = "forms_slow"

    def run(self, x, *, cfg):
        return jax.pure_callback(lambda x: np.asarray(_sleep(x, cfg)), x, x) + 1

    def heuristic_cfg(self, inv):
        return 8

    def candidate_cfgs(self, inv):
        return [5, 0, 6]


SLOW = Slow()


class Tuner:
    """Finds the config 42 for everything."""

    def tune(self, inv, on_event=None):
        return Tuned(42, 1, 1.0, 2.0, ())


def refuses(call, error, match):
    with pytest.raises(error, match=match):
        call()


# Kernel.__init__


def test_kernels_are_named_either_way():
    kernels = [Own("forms_named", "3"), Own(name="forms_named", version="3"), Own(op_id="forms_named", version="3")]
    assert {(k.op_id, k.version, k.op_id_v) for k in kernels} == {("forms_named", "3", "forms_named@v3")}
    assert len(set(kernels)) == 1
    assert Own(name="forms_named").op_id_v == "forms_named@v1"


def test_kernels_with_two_names_or_a_taken_one_are_refused():
    refuses(lambda: Own("forms_one", op_id="forms_other"), ConfigError, "two spellings")
    Own("forms_taken")
    refuses(lambda: Slow("forms_taken"), ConfigError, r"forms_taken@v1 is the name of both .*Own and .*Slow")
    with pytest.warns(UserWarning, match="it replaces forms_again@v1"):
        [type("Again", (Own,), {})("forms_again") for _ in range(2)]


# Candidates


@pytest.mark.cpu
def test_candidates_are_spelled_either_way():
    class Canonical(Own):
        def candidate_cfgs(self, inv):
            return [3, 4]

        def candidate_cfgs_cpu(self, inv):
            return [5, 6]

    class Accepted(Own):
        def config_space(self, inv):
            return [3, 4]

        def config_space_cpu(self, inv):
            return [5, 6]

    for kernel in (Canonical("forms_candidates"), Accepted("forms_space")):
        inv = Invocation(kernel, (X,))
        assert (list(kernel.candidate_cfgs(inv)), list(kernel.all_candidates(inv))) == ([3, 4], [5, 6])


def test_candidates_in_two_spellings_are_refused():
    def define():
        class Both(Own):
            def candidate_cfgs(self, inv):
                return [3]

            def config_space(self, inv):
                return [4]

        Both("forms_both_spaces")

    refuses(define, ConfigError, "candidate_cfgs.*config_space|config_space.*candidate_cfgs")


# Run and its variants


@dataclasses.dataclass(frozen=True)
class Backend:
    backend: str | None = None


@pytest.mark.parametrize(("platform", "suffix"), [
    ("cuda", "triton"), ("cuda", "gpu"), ("tpu", "pallas"), ("tpu", "tpu"), ("cpu", "xla"), ("cpu", "cpu")
])  # fmt: skip
def test_variants_run_where_their_suffix_says(platform, suffix):
    kernel = type("Suffixed", (Own,), {f"run_{suffix}": lambda self, x, *, cfg: x + 123})(f"forms_run_{suffix}")
    for target in ("cuda", "tpu", "cpu"):
        text = jax.jit(kernel).trace(X).lower(lowering_platforms=(target,)).as_text()
        assert ("1.230000e+02" in text) == (target == platform)


@pytest.mark.parametrize("backend", ["triton", "pallas", "cudnn", "xla"])
def test_back_end_of_the_config_picks_the_variant(backend):
    class Picked(Own):
        config_cls = Backend

        def heuristic_cfg(self, inv):
            return Backend(backend)

        def why_not(self, inv, backend):
            return None

    others = {f"run_{name}": lambda self, x, *, cfg: x - 1 for name in ("triton", "pallas", "cudnn", "xla")}
    others[f"run_{backend}"] = lambda self, x, *, cfg: x + 1
    close(np.asarray(type("Picked", (Picked,), others)(f"forms_pick_{backend}")(X)), X + 1)


class Refusing(Own):
    """Its Triton version does no integers."""

    def unsupported(self, inv, backend):
        return "no integers" if backend == "triton" and inv.args[0].dtype == jnp.int32 else None


def lowered_for(kernel, x, platform="cuda"):
    return jax.jit(kernel).trace(x).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("config_cls", [None, Backend])
def test_the_device_picks_the_first_back_end_that_can_do_a_call(config_cls):
    def config(backend):
        return lambda self, inv: None if config_cls is None else Backend(backend)

    members = {"config_cls": config_cls}
    for backend, number in (("triton", 122), ("cudnn", 123), ("xla", 124)):
        members[f"run_{backend}"] = lambda self, x, *, cfg, number=number: x + number
        if config_cls:
            members[f"heuristic_cfg_{backend}"] = config(backend)
    kernel = type("Refusing", (Refusing,), members)(f"forms_refusing_{config_cls is None}")
    ints = X.astype(jnp.int32)
    assert "1.220000e+02" in lowered_for(kernel, X)
    assert "<123>" in lowered_for(kernel, ints)
    assert "1.240000e+02" in lowered_for(kernel, X, "cpu")


def test_the_method_of_a_platform_comes_before_those_of_back_ends():
    class Decided(Own):
        config_cls = Backend

        def heuristic_cfg_gpu(self, inv):
            return Backend("xla")

        def heuristic_cfg_triton(self, inv):
            return Backend("triton")

        def run_xla(self, x, *, cfg):
            return x + 123

        def run_triton(self, x, *, cfg):
            return x + 124

    assert "1.230000e+02" in lowered_for(Decided("forms_decided"), X)


@pytest.mark.cpu
def test_heuristics_and_candidates_have_variants_and_prepare_comes_first():
    class Varied(Own):
        name = "forms_varied"

        def prepare(self, x, factor=None):
            return (jnp.asarray(x),), {"factor": float(factor or 1)}

        def run_xla(self, x, *, factor, cfg):
            return x * factor * cfg

        def run(self, x, *, factor, cfg):
            raise AssertionError("there is a variant")

        def heuristic_cfg_xla(self, inv):
            assert inv.arguments["factor"] == 2.0
            return 10

        def candidate_cfgs_xla(self, inv):
            return [11]

    kernel = Varied()
    close(np.asarray(kernel(X.tolist(), 2)), X * 20)
    inv = Invocation(kernel, *kernel.prepare(X, factor=2))
    assert kernel.all_candidates(inv) == [11]
    assert key_of(kernel, X, factor=2.0) == Key(inv.device_fingerprint, inv.op_id_v, inv.call_key)


# Calling


def test_calls_go_through_an_executor_or_the_kernel():
    executor = Executor(ConfigSelectorChain())
    for run in (executor, default_executor(), Executor()):
        assert run(TOLD, ONE) == TOLD(ONE) == 1
        assert run(TOLD, ONE, cfg=5) == TOLD(ONE, cfg=5) == 5
        assert run(TOLD, x=ONE, cfg=None) == TOLD(x=ONE, cfg=None) == 1


def test_calls_that_are_none_are_refused():
    refuses(lambda: Executor(3), ConfigError, HINT)
    refuses(lambda: TOLD(), TypeError, "missing a required argument: 'x'")
    refuses(lambda: TOLD(ONE, ONE), TypeError, "too many positional arguments")
    refuses(lambda: TOLD(ONE, cfg=[1]), ConfigError, "cannot be hashed")


def test_a_call_of_what_is_no_kernel_is_refused():
    refuses(lambda: Executor()(3, ONE), TypeError, "[Kk]ernel")


@pytest.mark.parametrize(("op", "config_type", "arrays"), [
    (linear, LinearConfig, (X, X.T)), (flash_attention, AttentionConfig, (normal(1, 1, 4, 2, 8),) * 3),
    (rms_norm, NormConfig, (X,)), (layer_norm, NormConfig, (X,)),
])  # fmt: skip
def test_ops_take_config_cfg_and_backend(op, config_type, arrays):
    config = config_type(backend="xla")
    wanted = op(*arrays, config=config)
    for form in ({"cfg": config}, {"backend": "xla"}, {"config": config, "backend": "xla"}, {}):
        close(op(*arrays, **form), wanted)
    refuses(lambda: op(*arrays, config=config, cfg=config), ConfigError, "two spellings")
    refuses(lambda: op(*arrays, config=config, backend="triton"), ConfigError, "give one")
    refuses(lambda: op(*arrays, config=3), ConfigError, HINT)


# Gradients


class SquareBackward(Own):
    name = "forms_square_bwd"

    def run(self, x, y, out, dout, *, cfg, needs):
        return 2 * x * y * dout if needs[0] else None, x**2 * dout if needs[1] else None


class Square(Own):
    name = "forms_square"
    backward = SquareBackward()

    def run(self, x, y, *, cfg):
        return x**2 * y


class SquareResiduals(Square):
    name, backward = "forms_residuals", None

    def fwd_with_residuals(self, x, y, *, cfg):
        return x**2 * y, 2 * x

    def vjp(self, residuals, out, cotangent, x, y, *, cfg):
        return residuals * y * cotangent, x**2 * cotangent


class SquareCustom(Square):
    name, backward = "forms_custom", None

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        x, y = primals
        (cotangent,) = cotangents
        return 2 * x * y * cotangent, x**2 * cotangent


@pytest.mark.parametrize("cls", [Square, SquareResiduals, SquareCustom])
def test_gradients_are_equal_in_every_form_and_have_a_label_of_their_own(cls):
    kernel = cls()
    arrays = (X, normal(2, 4, 3))

    def gradients(fn):
        return jax.jit(jax.grad(lambda x, y: jnp.sin(fn(x, y)).sum(), (0, 1)))

    lowered = gradients(kernel).lower(*arrays)
    names = [split_label(text)[0] for text in find_labels_in_lowered(lowered)]
    assert names == [f"{kernel.op_id}@v1", f"{kernel.op_id}_bwd@v1"]
    close(lowered.compile()(*arrays), gradients(lambda x, y: x**2 * y)(*arrays))


def test_gradients_in_two_forms_or_half_of_one_are_refused():
    def method(self, *args, **kwargs):
        raise AssertionError("never called")

    for number, (base, names) in enumerate([
        (Square, ["custom_vjp"]), (Square, ["vjp", "fwd_with_residuals", "custom_vjp"]),
        (SquareResiduals, ["custom_vjp"]), (SquareCustom, ["vjp", "fwd_with_residuals"]),
    ]):  # fmt: skip
        cls = type("TwoForms", (base,), dict.fromkeys(names, method))
        refuses(lambda cls=cls, n=number: cls(f"forms_two_{n}"), ConfigError, "a gradient has one definition")
    for name in ("vjp", "fwd_with_residuals"):
        half = type("HalfForm", (Own,), {name: method})
        refuses(lambda half=half, n=name: half(f"forms_half_{n}"), ConfigError, "define both")


# Invocation


def test_invocations_of_every_spelling_are_one_call():
    plain = Invocation(TOLD, (ONE,))
    others = [
        Invocation(TOLD, [ONE]),
        Invocation(TOLD, (), {"x": ONE}),
        Invocation(TOLD, (ONE,), None, {"any": "thing"}),
        Invocation(kernel=TOLD, args=(jax.ShapeDtypeStruct((), "float32"),), kwargs={}, metadata=None),
        Invocation(TOLD, (ONE,), override_cfg=3),
    ]
    assert {inv.call_key for inv in others} == {plain.call_key}
    assert {inv.abstract_args for inv in others} == {plain.abstract_args}
    assert (plain.op_id, plain.op_id_v, plain.device_fingerprint) == ("test_told", "test_told@v1", device_fingerprint())
    assert (plain.batch_axes, plain.override_cfg, plain.metadata) == (None, None, None)
    assert others[-1].override_cfg == 3
    assert Invocation(TOLD, (ONE,), batch_axes=(0,)).call_key != plain.call_key


def test_explicit_config_of_an_invocation_is_what_is_chosen():
    assert ConfigSelectorChain().choose(Invocation(TOLD, (ONE,), override_cfg=3)) == 3


def test_invocations_with_arguments_that_do_not_fit_are_refused():
    refuses(lambda: Invocation(TOLD, (ONE, ONE)), TypeError, "its parameters are")
    refuses(lambda: Invocation(TOLD, (object(),)).call_key, ConfigError, "argument 'x' of test_told@v1")


# Caches


@pytest.fixture(params=[ConfigCache, PersistentCache])
def cache(request, tmp_path):
    return ConfigCache() if request.param is ConfigCache else PersistentCache(path=tmp_path, cfg_type=int)


def test_caches_take_three_arguments_a_key_or_any_key(cache):
    cache.put("cpu|cpu", "forms@v1", HEX, 3)
    key = Key("cpu|cpu", "forms@v1", HEX)
    assert cache.get("cpu|cpu", "forms@v1", HEX) == cache.get(key) == 3
    cache.put(key, 4)
    assert cache.get("cpu|cpu", "forms@v1", HEX) == 4
    for any_key in ("text", 7, ("a", 1), ("a", "b", "c", "d"), frozenset({1})):
        assert any_key not in cache
        cache.put(any_key, 5)
        assert cache.get(any_key) == 5
        assert any_key in cache
    assert key in cache


def test_caches_refuse_none(cache):
    refuses(lambda: cache.put("key", None), ConfigError, "cfg is None")
    refuses(lambda: cache.put(*KEY, None), ConfigError, "cfg is None")


def test_caches_refuse_two_of_three_arguments(cache):
    for call in (
        lambda: cache.get("cpu", "op@v1"),
        lambda: cache.put("cpu", "op@v1", 3),
        lambda: cache.put("cpu", "op@v1", HEX, "more", 3),
    ):
        refuses(call, TypeError, "expected one key, or device, op_id_v and call_key")


def test_caches_refuse_a_put_without_a_config(cache):
    refuses(lambda: cache.put("key"), TypeError, HINT)


def test_caches_refuse_a_call_key_without_an_op(cache):
    refuses(lambda: cache.get("cpu", call_key=HEX), TypeError, HINT)


def test_disk_cache_refuses_keys_without_a_value_based_form(tmp_path):
    refuses(lambda: PersistentCache(path=tmp_path).put(object(), 3), ConfigError, "no value-based form")
    assert PersistentCache(tmp_path).path == PersistentCache(path=str(tmp_path)).path == tmp_path


def test_only_keys_of_calls_take_part_in_choices():
    selector = ConfigSelectorChain()
    selector.cache.put(KEY.call_key, 4)
    selector.cache.put((*KEY, "more"), 4)
    assert Executor(selector)(TOLD, ONE) == 1
    with overlay_cache(selector.cache):
        assert TOLD(ONE) == 1
    refuses(lambda: overlay_cache({"any": 3}), ConfigError, r"expected Key\(device, op_id_v, call_key\)")


# Selector and policy


def test_selector_takes_its_parts_by_place_or_by_name(tmp_path):
    parts = (ConfigCache(), PersistentCache(tmp_path), Tuner(), AutotunePolicy(mode="cached"), False, print)
    names = ("cache", "persistent", "tuner", "policy", "persist_autotune", "on_event")
    for selector in (ConfigSelectorChain(*parts), ConfigSelectorChain(**dict(zip(names, parts)))):
        assert tuple(getattr(selector, name) for name in names) == parts
    bare = ConfigSelectorChain()
    assert (bare.persistent, bare.policy, bare.persist_autotune) == (None, AutotunePolicy(), True)


@pytest.mark.parametrize("tunes", [True, False])
def test_tuning_on_calls_is_spelled_either_way(tunes):
    canonical = ConfigSelectorChain(tuner=Tuner(), policy=AutotunePolicy(tune_on_call=tunes))
    accepted = ConfigSelectorChain(tuner=Tuner(), autotune=tunes)
    assert canonical.policy == accepted.policy
    assert Executor(canonical)(TOLD, ONE) == Executor(accepted)(TOLD, ONE) == (42 if tunes else 1)


def test_autotune_joins_a_policy_of_another_mode():
    selector = ConfigSelectorChain(policy=AutotunePolicy(mode="cached"), autotune=True)
    assert selector.policy == AutotunePolicy(mode="cached", tune_on_call=True)


def test_selector_refuses_two_spellings_that_disagree():
    policy = AutotunePolicy(tune_on_call=True)
    refuses(lambda: ConfigSelectorChain(policy=policy, autotune=False), ConfigError, "tune_on_call")


@pytest.mark.parametrize("parts", [{"policy": "off"}, {"cache": {}}, {"persistent": "folder"}, {"tuner": 3}])
def test_selector_refuses_parts_of_another_type(parts):
    refuses(lambda: ConfigSelectorChain(**parts), (ConfigError, TypeError), HINT)


@pytest.mark.parametrize(("fields", "match"), [
    ({"mode": "on"}, "expected one of auto, cached, pinned, off"),
    ({"mode": None}, "expected one of"),
    ({"tune_on_call": None}, "expected True or False"),
])  # fmt: skip
def test_policy_refuses_values_wherever_they_are_given(fields, match):
    refuses(lambda: AutotunePolicy(**fields), ConfigError, match)
    refuses(lambda: policy_override(**fields), ConfigError, match)
    refuses(lambda: AutotunePolicy(autotune=True), TypeError, "autotune")


def chosen_in(mode):
    selector = ConfigSelectorChain(tuner=Tuner(), policy=AutotunePolicy(mode=mode, tune_on_call=True))
    return Executor(selector).choose_config(TOLD, ONE)


def test_modes_of_a_policy():
    assert (chosen_in("auto"), chosen_in("cached"), chosen_in("off")) == (42, 1, 1)
    refuses(lambda: chosen_in("pinned"), ConfigError, "policy is pinned")
    with overlay_cache({KEY: 6}):
        assert [chosen_in(mode) for mode in ("auto", "cached", "pinned", "off")] == [6, 6, 6, 1]


# Overrides


def test_overlays_are_mappings_or_caches_copied_at_entry():
    mine = ConfigCache()
    mine.put(KEY, 7)
    forms = [{KEY: 7}, {tuple(KEY): 7}, mine, types.MappingProxyType({KEY: 7})]
    for form in forms:
        with overlay_cache(form):
            assert TOLD(ONE) == 7
    copied = overlay_cache(mine)
    with copied:
        mine.put(KEY, 8)
        assert TOLD(ONE) == 7
    assert TOLD(ONE) == 1


def test_overlays_refuse_what_is_no_mapping():
    refuses(lambda: overlay_cache(3), (ConfigError, TypeError), HINT)


def test_overlays_refuse_none():
    refuses(lambda: overlay_cache({KEY: None}), ConfigError, "None")


def test_policies_are_overridden_for_one_selector_or_all_in_either_spelling():
    mine, other = (ConfigSelectorChain(tuner=Tuner(), autotune=True) for _ in range(2))

    def tunes():
        return [mine.policy_under(current()).tune_on_call, other.policy_under(current()).tune_on_call]

    forms = {
        (False, False): [{"tune_on_call": False}, {"autotune": False}, {"selector": None, "autotune": False}],
        (False, True): [{"selector": mine, "tune_on_call": False}, {"selector": mine, "autotune": False}],
    }
    for wanted, spellings in forms.items():
        for fields in spellings:
            with policy_override(**fields):
                assert tuple(tunes()) == wanted
    with policy_override(mine, autotune=False):
        assert tunes() == [False, True]
    assert tunes() == [True, True]


def test_overrides_refuse_unknown_fields_with_a_hint():
    refuses(lambda: policy_override(autotun=False), ConfigError, "unknown policy field 'autotun'")
    refuses(lambda: policy_override(mod="off"), ConfigError, "did you mean 'mode'")
    refuses(lambda: policy_override(autotune=1), ConfigError, "expected True or False")


def test_overrides_refuse_two_spellings_that_disagree():
    refuses(lambda: policy_override(autotune=False, tune_on_call=True), ConfigError, "tune_on_call")


def test_overrides_refuse_what_is_no_selector():
    refuses(lambda: policy_override(3, mode="off"), (ConfigError, TypeError), HINT)


# Tuning


def quick():
    return ConfigSelectorChain(tuner=Autotuner(num_iters=3))  # six last rounds: other processes may be busy


@pytest.mark.cpu
def test_tuning_a_call_by_hand_takes_arrays_or_shapes_and_configs_or_none():
    abstract = jax.ShapeDtypeStruct(X.shape, X.dtype)
    for args, configs in [((X,), None), ((X,), [0, 5]), ((abstract,), (c for c in [0, 5]))]:
        assert autotune(SLOW, *args, configs=configs, num_warmup=1, num_iters=1) == 0
    assert autotune(SLOW, x=X, num_warmup=0, num_iters=1) == 0
    assert len(default_selector().cache) == 0


def test_tuning_by_hand_refuses_configs_and_counts_that_make_no_sense():
    refuses(lambda: autotune(SLOW, X, configs=[None]), ConfigError, "configs has a None")
    refuses(lambda: autotune(SLOW, X, configs=[[1]]), ConfigError, "cannot be hashed")
    refuses(lambda: autotune(SLOW, X, num_iters=0), ValueError, "num_iters is 0; expected at least 1")
    refuses(lambda: autotune(SLOW), TypeError, "missing a required argument: 'x'")


def test_tuning_by_hand_refuses_what_is_no_kernel():
    refuses(lambda: autotune(lambda x: x, X), TypeError, "[Kk]ernel")


def test_benchmark_takes_arguments_and_returns_milliseconds():
    times = [benchmark(_sleep, X, 3.0, num_iters=3), benchmark(lambda: _sleep(X, 3.0), num_iters=3, num_warmup=0)]
    times.append(benchmark(_sleep, x=X, ms=3.0))
    assert all(3.0 <= ms < 100.0 for ms in times)
    refuses(lambda: benchmark(_sleep, X, 0, num_iters=0), ValueError, HINT)


@pytest.fixture(scope="module")
def lowered():
    return jax.jit(lambda x: SLOW(x)).lower(X)


def outcome(result):
    return [(e.op_id_v, e.call_key, e.cfg) for e in result.entries], result.digest


@pytest.mark.cpu
def test_lowered_programs_are_tuned_with_a_selector_or_the_default_one(lowered):
    canonical = autotune_lowered(quick(), lowered, strict=False, sync=False)
    set_default_selector(quick())
    accepted = autotune_lowered(lowered)
    assert outcome(canonical) == outcome(accepted)
    assert outcome(autotune_lowered(selector=default_selector(), lowered=lowered.as_text())) == outcome(accepted)
    assert [e.cfg for e in accepted.entries] == [0]
    assert {e.source for e in accepted.entries} == {"tuned"}


def test_lowered_tuning_refuses_what_is_no_program(lowered):
    refuses(lambda: autotune_lowered(3), LabelError, "expected a Lowered")
    refuses(lambda: autotune_lowered(quick(), 3), LabelError, "expected a Lowered")
    refuses(lambda: autotune_lowered(lowered, quick()), ConfigError, "expected a ConfigSelectorChain")
    refuses(lambda: autotune_lowered(quick(), lowered.compile()), LabelError, "the program is compiled")


@pytest.mark.parametrize("wrong", [3, {}, Executor()])
def test_lowered_tuning_refuses_what_is_no_selector(lowered, wrong):
    refuses(lambda: autotune_lowered(wrong, lowered), (ConfigError, TypeError), HINT)


@pytest.mark.cpu
def test_recorded_calls_are_tuned_with_a_selector_or_as_a_mapping():
    clear_invocations()
    record_invocation(SLOW, Invocation(SLOW, (X[:2],)))
    set_default_selector(quick())
    canonical = autotune_recorded(quick())
    assert outcome(canonical) == outcome(autotune_recorded(get_invocations())) == outcome(autotune_recorded())
    assert outcome(autotune_recorded(selector=quick())) == outcome(canonical)
    assert [e.cfg for e in canonical.entries] == [0]
    assert autotune_recorded({}).entries == ()


@pytest.mark.parametrize("wrong", [3, [1], "text", Executor()])
def test_recorded_tuning_refuses_what_is_neither_selector_nor_mapping(wrong):
    clear_invocations()
    refuses(lambda: autotune_recorded(wrong), (ConfigError, TypeError), HINT)


def test_tuner_tunes_any_function():
    def make(ms):
        return lambda x, y: jax.pure_callback(lambda x: np.asarray(_sleep(x, ms)), x, x) + y

    tuner = Autotuner(num_iters=1)
    for args, kwargs in [((X, X), {}), ((X,), {"y": X})]:
        assert tuner.autotune(make, args, kwargs, [50, 0, 25]) == 0
    assert tuner.autotune(make_fn=make, args=(X, X), kwargs={}, candidates=iter([50, 0])) == 0
    refuses(lambda: tuner.autotune(make, (X,), {}, [10]), TuningError, "no candidate could be run: 10: TypeError")
    refuses(lambda: tuner.autotune(make, (X, X), {}, []), TuningError, "there are none")


# Results


def test_results_are_constructed_from_device_and_entries():
    entry = Entry(KEY.op_id_v, KEY.call_key, 6)
    assert entry == Entry(op_id_v=KEY.op_id_v, call_key=KEY.call_key, cfg=6)
    assert (entry.count, entry.source, entry.ms, entry.trials) == (1, "tuned", None, ())
    result = AutotuningResult(device_fingerprint(), (entry,))
    assert result == AutotuningResult(device=device_fingerprint(), entries=(entry,), skipped=())
    assert result.as_overlay() == {KEY: 6}
    with result:
        assert TOLD(ONE) == 6
    refuses(lambda: Entry(KEY.op_id_v, KEY.call_key, 6, 2), TypeError, "positional")
    refuses(lambda: AutotuningResult("cpu", (), ()), TypeError, "positional")


def test_entries_refuse_none():
    refuses(lambda: Entry(KEY.op_id_v, KEY.call_key, None), ConfigError, "None")


# Registry


def test_calls_are_recorded_in_either_form():
    clear_invocations()
    inv = Invocation(SLOW, (X,))
    record_invocation(SLOW, inv)
    short = get_invocations()
    clear_invocations()
    record_invocation(inv.device_fingerprint, inv.op_id_v, inv.call_key, SLOW, (X,), {})
    assert get_invocations() == get_invocations(device_fingerprint()) == get_invocations(device=None) == short
    assert short == {"forms_slow@v1": {inv.call_key: (SLOW, (jax.ShapeDtypeStruct(X.shape, X.dtype),), {})}}
    clear_invocations()
    assert get_invocations() == {}


@pytest.mark.parametrize("count", [0, 1, 3, 5, 7])
def test_recording_refuses_other_numbers_of_arguments(count):
    refuses(lambda: record_invocation(*[SLOW] * count), TypeError, r"expected \(kernel, inv\) or 6 arguments")


def test_recording_refuses_arguments_that_do_not_fit_the_kernel():
    refuses(lambda: record_invocation("cpu", "forms_slow@v1", HEX, SLOW, (), {}), TypeError, "missing")


@pytest.mark.parametrize("pair", [(SLOW, 3), (Invocation(SLOW, (X,)), SLOW), (3, Invocation(SLOW, (X,)))])
def test_recording_refuses_what_is_no_kernel_with_its_invocation(pair):
    refuses(lambda: record_invocation(*pair), (ConfigError, TypeError), HINT)


def test_recording_refuses_the_invocation_of_another_kernel():
    refuses(lambda: record_invocation(TOLD, Invocation(SLOW, (X,))), (ConfigError, TypeError), HINT)


# Batches


def test_vmap_takes_the_executor_anywhere():
    executor = Executor(ConfigSelectorChain())
    executor.chooser.cache.put(key_of(TOLD, X[0]), 5)
    forms = [
        vmap_with_config(TOLD, in_axes=0, executor=executor),
        vmap_with_config(TOLD, 0, executor),
        vmap_with_config(executor, TOLD),
        vmap_with_config(executor, TOLD, in_axes=0),
        vmap_with_config(executor, TOLD, (0,)),
        vmap_with_config(TOLD, executor=executor),
    ]
    for batched in forms:
        np.testing.assert_array_equal(batched(X), np.full_like(X, 5))
    np.testing.assert_array_equal(vmap_with_config(TOLD)(X), np.ones_like(X))


@pytest.mark.cpu
def test_pmap_takes_the_executor_anywhere():
    executor = Executor(ConfigSelectorChain())
    executor.chooser.cache.put(key_of(TOLD, X[0]), 5)
    forms = [
        pmap_with_config(TOLD, axis_name="devices", executor=executor),
        pmap_with_config(TOLD, "devices", executor=executor),
        pmap_with_config(executor, TOLD),
        pmap_with_config(executor, TOLD, axis_name="rows"),
    ]
    for parallel in forms:
        np.testing.assert_array_equal(parallel(X), np.full_like(X, 5))
    np.testing.assert_array_equal(pmap_with_config(TOLD)(X), np.ones_like(X))


@pytest.mark.parametrize("batch", [vmap_with_config, pmap_with_config])
def test_batches_refuse_arguments_that_do_not_fit(batch):
    refuses(lambda: batch(3), TypeError, "no kernel")
    refuses(lambda: batch(Executor()), TypeError, "no kernel")
    refuses(lambda: batch(TOLD, TOLD), TypeError, "one kernel too many")
    refuses(lambda: batch(Executor(), TOLD, executor=Executor()), TypeError, "one executor too many")
    refuses(lambda: batch(TOLD, 0, in_axes=0), TypeError, "one in_axes too many")
    refuses(lambda: batch(TOLD, in_axes=(0, 0))(X), ValueError, "in_axes has 2 entries for 1")
    refuses(lambda: batch(TOLD)(ONE), ValueError, "no argument of test_told has an axis")


@pytest.mark.parametrize("batch", [vmap_with_config, pmap_with_config])
@pytest.mark.parametrize("wrong", [3, ConfigSelectorChain()])
def test_batches_refuse_what_is_no_executor(batch, wrong):
    refuses(lambda: batch(TOLD, executor=wrong)(X), (ConfigError, TypeError), "[Ee]xecutor")


def test_pmap_refuses_another_number_of_rows_than_devices():
    refuses(lambda: pmap_with_config(TOLD)(np.ones((9, 3))), ValueError, "number of devices")
    refuses(lambda: pmap_with_config(TOLD, "a", axis_name="b"), TypeError, "one axis_name too many")


# Labels


def test_labels_are_built_with_prefixes_or_decorate(monkeypatch):
    built = [label("forms@v1", HEX), label(op_id_v="forms@v1", call_hash=HEX, prefix=None)]
    built.append(label("forms@v1", HEX, "ejkernel_ops#"))
    assert set(built) == {f"ejkernel_ops#forms@v1:{HEX}"}
    monkeypatch.setenv("EJKERNEL_OPS_PREFIX", "mine#")
    assert label("forms@v1", HEX) == f"mine#forms@v1:{HEX}"
    assert extract_labels_from_hlo_text(label("forms@v1", HEX)) == [f"mine#forms@v1:{HEX}"]


def decorated(name, **options):
    return jax.jit(label(name, **options)(lambda x: x * 2)).lower(X)


def test_decorators_take_a_version_and_a_prefix():
    (first,) = find_labels_in_lowered(decorated("forms_decorated"))
    (second,) = find_labels_in_lowered(decorated("forms_decorated@v1"))
    (third,) = find_labels_in_lowered(decorated("forms_decorated", prefix="mine#"), prefix="mine#")
    assert first == second == third.replace("mine#", "ejkernel_ops#")
    found = LABEL_RE.fullmatch(first)
    assert (found["op"], len(found["key"])) == ("forms_decorated@v1", 16)
    assert extract_labels_from_hlo_text(decorated("forms_decorated", prefix="mine#").as_text(), "mine#") == [third]


def test_decorated_functions_have_nothing_to_tune():
    lowered = decorated("forms_only")
    result = autotune_lowered(quick(), lowered)
    assert result.entries == ()
    assert result.skipped == ((find_labels_in_lowered(lowered)[0], "label only"),)


def test_configs_of_labels_take_a_program_its_text_or_a_list(lowered):
    selector = quick()
    selector.cache.put(key_of(SLOW, X), 10)
    labels = find_labels_in_lowered(lowered)
    forms = [(lowered, selector), (lowered.as_text(), selector), (labels, selector), (tuple(labels), selector)]
    set_default_selector(selector)
    forms += [(lowered,), (labels,), (iter(labels), None)]
    for form in forms:
        assert labels_to_configs(*form) == [(labels[0], 10)]
    assert labels_to_configs(lowered=lowered, selector=selector) == [(labels[0], 10)]
    assert labels_to_configs([]) == []


def test_labels_refuse_malformed_parts():
    refuses(lambda: label("forms", HEX), LabelError, "expected name@vN and 16 hex digits")
    refuses(lambda: label("forms@v1", HEX[:-1]), LabelError, "16 hex digits")
    refuses(lambda: label("forms@v1", 3), LabelError, "16 hex digits")
    refuses(lambda: label("a b"), LabelError, "expected name@vN")
    refuses(lambda: label("forms", prefix="mine"), LabelError, "prefix is 'mine'")
    refuses(lambda: labels_to_configs(["forms"]), LabelError, "expected prefix#name@vN")
    refuses(lambda: labels_to_configs(3), LabelError, "expected a Lowered")


def test_labels_refuse_what_is_no_name():
    refuses(lambda: label(lambda x: x), (LabelError, TypeError), HINT)


def test_configs_of_labels_refuse_what_is_no_selector():
    refuses(lambda: labels_to_configs([label("forms@v1", HEX)], 3), (ConfigError, TypeError), HINT)


# Devices, keys, serialization


@pytest.mark.cpu
def test_devices_have_one_of_three_kinds_and_languages():
    assert (device_kind(), get_device_platform()) == ("cpu", "xla")
    assert [get_device_platform(name) for name in ("cuda", "rocm", "gpu")] == ["triton"] * 3


def test_keys_are_built_of_kernel_and_arguments_in_any_spelling():
    key = default_key_builder_with_sharding(TOLD, (ONE,), {})
    assert isinstance(key, Key)
    assert key == KEY == default_key_builder_with_sharding(TOLD, (), {"x": ONE})
    assert key == default_key_builder_with_sharding(TOLD, (ONE,)) == tuple(key)
    assert default_key_builder_with_sharding(kernel=TOLD, args=(ONE,), kwargs=None) == key
    refuses(lambda: default_key_builder_with_sharding(TOLD, (), {}), TypeError, "missing a required argument: 'x'")


def test_configs_are_read_back_typed_and_nested():
    config = AttentionConfig(backend="xla", fwd=FwdParams(q_blocksize=16))
    assert from_json(to_json(config), AttentionConfig) == from_json(to_json(config).encode(), AttentionConfig) == config
    assert stable_json(config) == stable_json(dataclasses.replace(config))
    assert from_json(to_json({"a": [1, 2]}), dict) == {"a": [1, 2]}


def test_serialization_refuses_what_it_cannot_write_or_read():
    refuses(lambda: to_json(object()), ConfigError, "no JSON form")
    refuses(lambda: stable_json(object()), ConfigError, "no value-based form")
    refuses(lambda: from_json("{"), TypeError, "config_type")
    refuses(lambda: from_json("{", FwdParams), ValueError, "not valid JSON")
    refuses(lambda: from_json('{"num_warp": 4}', FwdParams), ValueError, "did you mean 'num_warps'")
    refuses(lambda: from_json('{"num_warps": "4"}', FwdParams), ValueError, "not a FwdParams")


def test_a_back_end_that_is_not_here_is_refused():
    refuses(lambda: linear(X, X.T, backend="triton"), UnsupportedError, "backend='triton' was asked for, but")
