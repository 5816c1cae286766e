"""What the guide and the three source pages of the framework show works, and returns what they say it returns."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ejkernel_ops
from ejkernel_ops import (
    LABEL_PREFIXES,
    LABEL_RE,
    Autotuner,
    AutotuningResult,
    BwdParams,
    Cfg,
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
    Out,
    PersistentCache,
    autotune,
    autotune_lowered,
    autotune_recorded,
    benchmark,
    clear_invocations,
    default_key_builder_with_sharding,
    device_fingerprint,
    device_kind,
    extract_labels_from_hlo_text,
    find_labels_in_lowered,
    from_json,
    get_device_platform,
    get_invocations,
    label,
    labels_to_configs,
    linear,
    overlay_cache,
    pmap_with_config,
    policy_override,
    record_invocation,
    set_default_selector,
    sharding_fingerprint,
    stable_json,
    to_json,
    vmap_with_config,
)
from ejkernel_ops.modules import flash_attention

from .fakes import _sleep
from .ops import attention, close, normal

A, B = normal(0, 3, 4), normal(1, 4, 2)
HEX = "0123456789abcdef"


@dataclasses.dataclass(frozen=True)
class Tiles:
    block_size: int = 128
    num_warps: int = 4
    algorithm: str = "default"


class Product(Kernel[Tiles, jax.Array]):
    """A matrix product whose config space holds one quick config, and which tells nothing about it."""

    def __init__(self):
        super().__init__(name="guide_product")

    def run(self, a, b, *, cfg: Tiles, **kwargs):
        a = jax.pure_callback(lambda a: np.asarray(_sleep(a, cfg.num_warps)), a, a)
        return jnp.dot(a, b) * kwargs.get("scale", 1.0)

    def heuristic_cfg(self, inv: "Invocation"):
        return Tiles(block_size=128 if inv.args[0].shape[0] >= 128 else 64, num_warps=8)

    def config_space(self, inv: "Invocation"):
        return [Tiles(64, 5), Tiles(128, 0), Tiles(256, 6)]


QUICK, DEFAULT = Tiles(128, 0), Tiles(64, 8)


class Shown(Kernel[Tiles, jax.Array]):
    """The output is the block size that was chosen."""

    def __init__(self):
        super().__init__(name="guide_shown")

    def run(self, x, *, cfg: Tiles, **kwargs):
        return x * 0 + cfg.block_size

    def heuristic_cfg(self, inv):
        return Tiles(block_size=1)


PRODUCT, SHOWN = Product(), Shown()
ONES = np.ones(3, np.float32)


def key_of(kernel, *args, **kwargs):
    inv = Invocation(kernel, args, kwargs)
    return Key(inv.device_fingerprint, inv.op_id_v, inv.call_key)


class Tuner:
    """Finds the block size 42 for everything, and counts how often it is asked."""

    asked = 0

    def tune(self, inv, on_event=None):
        self.asked += 1
        return ejkernel_ops.execution.tuning.Tuned(Tiles(block_size=42), Tiles(), 1.0, 2.0, ())


def quick_tuner():
    return Autotuner(num_warmup=1, num_iters=1)


# Kernel


def test_a_kernel_is_named_run_with_extra_keywords_and_callable_by_itself():
    assert (PRODUCT.op_id, PRODUCT.op_id_v) == ("guide_product", "guide_product@v1")
    close(PRODUCT(A, B, cfg=QUICK), A @ B)
    close(PRODUCT(A, B, cfg=QUICK, scale=3.0), 3 * A @ B)


def test_a_heuristic_sees_the_shapes_of_the_arguments():
    executor = Executor(ConfigSelectorChain())
    sizes = [executor.choose_config(PRODUCT, np.ones((n, 4), np.float32), B).block_size for n in (127, 128)]
    assert sizes == [64, 128]


def test_type_variables_stand_for_config_and_output():
    assert issubclass(Kernel[Cfg, Out].__origin__, Kernel)
    assert Product.config_cls is Tiles


class Platforms(Kernel[Tiles, jax.Array]):
    name = "guide_platforms"

    def run_triton(self, x, *, cfg, **kwargs):
        return x + 111

    def run_pallas(self, x, *, cfg, **kwargs):
        return x + 222

    def run_xla(self, x, *, cfg, **kwargs):
        return x + 333

    def run(self, x, *, cfg, **kwargs):
        return x + 444

    def heuristic_cfg(self, inv):
        return Tiles()


PLATFORMS = Platforms()


@pytest.mark.cpu
def test_hardware_decides_which_method_runs():
    np.testing.assert_allclose(PLATFORMS(ONES), ONES + 333)
    for platform, number in {"cpu": "3.33", "cuda": "1.11", "tpu": "2.22"}.items():
        text = jax.jit(PLATFORMS).trace(ONES).lower(lowering_platforms=(platform,)).as_text()
        assert [n for n in ("1.11", "2.22", "3.33", "4.44") if f"dense<{n}" in text] == [number]


@pytest.mark.cpu
def test_run_is_what_other_hardware_falls_back_to():
    class Fallback(Kernel):
        def run_triton(self, x, *, cfg):
            return x + 1

        def run(self, x, *, cfg):
            return x + 2

        def heuristic_cfg(self, inv):
            return 1

    np.testing.assert_allclose(Fallback("guide_fallback")(ONES), ONES + 2)


def test_custom_vjp_gets_a_tuple_of_cotangents_and_its_gradients_are_used():
    class Custom(Kernel[Tiles, jax.Array]):
        name = "guide_custom"

        def run(self, a, b, *, cfg, **kwargs):
            return jnp.dot(a, b)

        def custom_vjp(self, primals, cfg, kwargs, cotangents):
            a, b = primals
            assert isinstance(cotangents, tuple)
            assert cfg == Tiles(7)
            assert kwargs == {"scale": 2.0}
            return 10 * cotangents[0] @ b.T, 10 * a.T @ cotangents[0]

    custom = Custom()
    found = jax.grad(lambda a, b: custom(a, b, cfg=Tiles(7), scale=2.0).sum(), (0, 1))(A, B)
    plain = jax.grad(lambda a, b: 10 * (a @ b).sum(), (0, 1))(A, B)
    close(found, plain)


# Invocation


def test_an_invocation_holds_a_call_without_its_values():
    inv = Invocation(kernel=PRODUCT, args=(A, B), kwargs={"scale": 1.0}, metadata={"from": "guide"})
    assert inv.kernel is PRODUCT
    assert inv.metadata == {"from": "guide"}
    assert inv.kwargs == {"scale": 1.0}
    assert inv.abstract_args == (jax.ShapeDtypeStruct((3, 4), "float32"), jax.ShapeDtypeStruct((4, 2), "float32"))
    assert inv.device_fingerprint == device_fingerprint()
    assert [x.shape for x in inv.args] == [(3, 4), (4, 2)]
    assert (inv.op_id, len(inv.call_key)) == ("guide_product", 16)


# Executor and the order of choice


def test_an_executor_runs_with_a_chosen_or_a_given_config():
    cache = ConfigCache()
    executor = Executor(ConfigSelectorChain(cache=cache))
    np.testing.assert_allclose(executor(SHOWN, ONES), ONES)
    np.testing.assert_allclose(executor(SHOWN, ONES, cfg=Tiles(5)), 5 * ONES)
    np.testing.assert_allclose(executor(SHOWN, ONES), ONES)
    assert len(cache) == 0


def test_memory_comes_before_disk_before_tuning_before_the_heuristic(tmp_path):
    tuner, persistent = Tuner(), PersistentCache(path=tmp_path)
    key = key_of(SHOWN, ONES)

    def chosen(**options):
        return float(Executor(ConfigSelectorChain(tuner=tuner, **options))(SHOWN, ONES)[0])

    cache = ConfigCache()
    cache.put(key, Tiles(2))
    assert chosen() == 1
    assert tuner.asked == 0
    assert chosen(autotune=True) == 42
    assert tuner.asked == 1
    persistent.put(key, Tiles(3))
    assert chosen(persistent=persistent, autotune=True) == 3
    assert chosen(cache=cache, persistent=persistent, autotune=True) == 2
    assert tuner.asked == 1


def test_tuning_on_calls_measures_the_config_space_once_and_keeps_the_best(tmp_path):
    cache, persistent = ConfigCache(), PersistentCache(path=tmp_path)
    events = []
    selector = ConfigSelectorChain(
        cache=cache,
        persistent=persistent,
        autotune=True,
        tuner=quick_tuner(),
        on_event=lambda event, **data: events.append(event),
    )
    for _ in range(2):
        close(Executor(selector)(PRODUCT, A, B), A @ B)
    assert cache.get(key_of(PRODUCT, A, B)) == persistent.get(key_of(PRODUCT, A, B)) == QUICK
    assert events.count("trial") == 4


# Caches


def test_memory_cache_stores_and_finds_under_any_key():
    cache, key = ConfigCache(), ("shape", (3, 4))
    assert cache.get(key) is None
    assert key not in cache
    cache.put(key, Tiles())
    assert cache.get(key) == Tiles()
    assert key in cache


def test_disk_cache_has_the_same_interface_and_outlives_its_object(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    persistent, key = PersistentCache(path="~/.cache/guide/configs"), ("shape", (3, 4))
    assert persistent.get(key) is None
    assert key not in persistent
    persistent.put(key, Tiles(64, 2, "other"))
    assert list((tmp_path / ".cache/guide/configs").iterdir())
    again = PersistentCache(path="~/.cache/guide/configs")
    assert again.get(key) == Tiles(64, 2, "other")
    assert key in again


def test_disk_cache_has_a_folder_of_the_user_by_default(tmp_path, monkeypatch):
    monkeypatch.delenv("EJKERNEL_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert PersistentCache().path == tmp_path / "ejkernel_ops" / "configs"


# Overrides


def test_an_overlay_is_another_cache_for_a_while():
    mine, executor = ConfigCache(), Executor(ConfigSelectorChain())
    mine.put(key_of(SHOWN, ONES), Tiles(9))
    with overlay_cache(mine):
        np.testing.assert_allclose(executor(SHOWN, ONES), 9 * ONES)
    np.testing.assert_allclose(executor(SHOWN, ONES), ONES)


def test_tuning_can_be_turned_off_for_a_while():
    tuner = Tuner()
    executor = Executor(ConfigSelectorChain(tuner=tuner, autotune=True))
    with policy_override(autotune=False):
        np.testing.assert_allclose(executor(SHOWN, ONES), ONES)
    assert tuner.asked == 0
    np.testing.assert_allclose(executor(SHOWN, ONES), 42 * ONES)


# Tuning


def test_config_space_is_what_tuning_tries():
    inv = Invocation(PRODUCT, (A, B))
    assert list(PRODUCT.config_space(inv)) == list(PRODUCT.candidate_cfgs(inv)) == PRODUCT.all_candidates(inv)


def test_manual_tuning_returns_the_best_config():
    configs = PRODUCT.config_space(Invocation(PRODUCT, (A, B)))
    assert autotune(PRODUCT, A, B, configs=configs, num_warmup=1, num_iters=1) == QUICK
    assert autotune(PRODUCT, A, B, num_warmup=1, num_iters=1) == QUICK


def test_benchmark_returns_milliseconds():
    assert 3.0 <= benchmark(lambda: _sleep(A, 3.0), num_iters=5) < 100.0
    assert benchmark(lambda: PRODUCT(A, B, cfg=QUICK), num_iters=3) > 0


def test_recorded_calls_are_tuned_at_once():
    selector = ConfigSelectorChain(tuner=quick_tuner())
    set_default_selector(selector)
    clear_invocations()
    first, second = Invocation(PRODUCT, (A, B)), Invocation(PRODUCT, (A[:2], B))
    for inv in (first, second):
        record_invocation(PRODUCT, inv)
    invocations = get_invocations()
    assert {op: set(calls) for op, calls in invocations.items()} == {
        "guide_product@v1": {first.call_key, second.call_key}
    }
    results = autotune_recorded(invocations)
    assert [(e.call_key, e.cfg) for e in results.entries] == [(first.call_key, QUICK), (second.call_key, QUICK)]
    assert selector.cache.get(key_of(PRODUCT, A, B)) == QUICK


def test_calls_record_themselves():
    clear_invocations()
    jax.jit(SHOWN).lower(ONES)
    assert list(get_invocations()["guide_shown@v1"]) == [key_of(SHOWN, ONES).call_key]


# Batches


def test_vmap_with_config_maps_the_axes_that_are_named():
    left, right = normal(2, 5, 3, 4), normal(3, 5, 4, 2)
    close(vmap_with_config(PRODUCT, in_axes=(0, 0))(left, right), left @ right)
    close(vmap_with_config(PRODUCT, in_axes=(0, None))(left, B), left @ B)


def test_vmap_with_config_chooses_one_config_for_the_batch():
    class Rows(Shown):
        rows, out_rows = (True,), (True,)

        def __init__(self):
            Kernel.__init__(self, "guide_rows")

    tuner, asked = Tuner(), []
    selector = ConfigSelectorChain(tuner=tuner, autotune=True)
    np.testing.assert_array_equal(vmap_with_config(Rows(), in_axes=0, executor=Executor(selector))(np.ones((5, 3))), 42)
    assert tuner.asked == 1
    selector = ConfigSelectorChain(on_event=lambda event, **data: asked.append(data["call_key"]))
    np.testing.assert_array_equal(vmap_with_config(SHOWN, in_axes=0, executor=Executor(selector))(np.ones((5, 3))), 1)
    assert set(asked) == {key_of(SHOWN, np.ones(3, np.float32)).call_key}


def test_pmap_with_config_runs_on_each_device():
    class Mean(Kernel):
        def run(self, x, y, *, cfg):
            return jax.lax.pmean(x * y, "devices") * cfg

        def heuristic_cfg(self, inv):
            return 2

    left, right = normal(4, 4, 3), normal(5, 4, 3)
    out = pmap_with_config(Mean("guide_mean"), axis_name="devices")(left, right)
    assert len(out.sharding.device_set) == 4
    close(np.asarray(out), np.broadcast_to(2 * (left * right).mean(0), (4, 3)))


# Parameters


def test_parameter_containers_hold_what_they_were_given():
    fwd = FwdParams(q_blocksize=128, kv_blocksize=256, num_warps=4, num_stages=2)
    bwd = BwdParams(q_blocksize=64, kv_blocksize=128)
    assert (fwd.q_blocksize, fwd.kv_blocksize, fwd.num_warps, fwd.num_stages) == (128, 256, 4, 2)
    assert (bwd.q_blocksize, bwd.kv_blocksize, bwd.num_warps) == (64, 128, None)


# Utilities


@pytest.mark.cpu
def test_devices_have_a_kind_a_kernel_language_and_a_name():
    assert (device_kind(), get_device_platform()) == ("cpu", "xla")
    assert [get_device_platform(p) for p in ("cuda", "tpu", "cpu")] == ["triton", "pallas", "xla"]
    assert device_fingerprint() == device_fingerprint(jax.devices()[1])
    assert device_fingerprint().startswith("cpu|")


def test_keys_tell_how_arguments_are_sharded():
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("data",))
    whole = jnp.asarray(normal(6, 4, 4))
    sharded = jax.device_put(whole, NamedSharding(mesh, PartitionSpec("data")))
    assert sharding_fingerprint(whole) == "single"
    assert sharding_fingerprint(sharded) == "mesh(data=4)(data,-)"
    plain = default_key_builder_with_sharding(PRODUCT, (whole, B), {})
    other = default_key_builder_with_sharding(PRODUCT, (sharded, B), {})
    assert plain == key_of(PRODUCT, whole, B)
    assert plain[:2] == other[:2]
    assert plain.call_key != other.call_key


def test_configs_go_to_json_and_back():
    for config in (Tiles(64, 2, "other"), FwdParams(q_blocksize=16)):
        text = to_json(config)
        assert isinstance(text, str)
        assert from_json(text, type(config)) == config


def test_stable_json_is_the_same_text_whatever_the_order():
    assert stable_json({"b": 1, "a": Tiles()}) == stable_json({"a": Tiles(), "b": 1})
    assert stable_json(Tiles(num_warps=2, block_size=1)) == stable_json(Tiles(1, 2))
    assert stable_json(Tiles(1)) != stable_json(Tiles(2))


def test_labels_of_a_program_are_found_and_lead_to_configs():
    selector = ConfigSelectorChain()
    set_default_selector(selector)
    lowered = jax.jit(lambda x: SHOWN(x) + SHOWN(x[:2]).sum()).lower(ONES)
    labels = find_labels_in_lowered(lowered)
    wanted = [label("guide_shown@v1", key_of(SHOWN, x).call_key) for x in (ONES, ONES[:2])]
    assert labels == wanted
    assert extract_labels_from_hlo_text(lowered.as_text()) == wanted
    assert extract_labels_from_hlo_text(lowered.as_text(dialect="hlo")) == wanted
    assert labels_to_configs(labels) == [(text, None) for text in wanted]
    selector.cache.put(key_of(SHOWN, ONES), Tiles(3))
    assert labels_to_configs(labels) == [(wanted[0], Tiles(3)), (wanted[1], None)]


def test_a_function_can_be_labelled():
    @label("guide_attention")
    def my_attention(q, k, v):
        """Attends."""
        return attention(q, k, v)

    q = normal(7, 1, 3, 2, 4)
    close(my_attention(q, q, q), attention(q, q, q))
    assert (my_attention.__name__, my_attention.__doc__) == ("my_attention", "Attends.")
    (text,) = find_labels_in_lowered(jax.jit(my_attention).lower(q, q, q))
    assert LABEL_RE.fullmatch(text)["op"] == "guide_attention@v1"


# Best practices


def test_attention_of_the_modules_is_causal_on_demand():
    q, k, v = (normal(seed, 1, 5, 2, 4) for seed in (8, 9, 10))
    close(flash_attention(q, k, v, causal=True), attention(q, k, v, causal=True))
    close(flash_attention(q, k, v), attention(q, k, v))


def test_longer_sequences_can_get_larger_blocks():
    class Growing(Kernel[Tiles, jax.Array]):
        name = "guide_growing"

        def run(self, q, *, cfg):
            return q * 0 + cfg.block_size

        def heuristic_cfg(self, inv):
            _, seq_len, _, _ = inv.args[0].shape
            return Tiles(256 if seq_len >= 2048 else 128 if seq_len >= 512 else 64)

    growing, executor = Growing(), Executor(ConfigSelectorChain())
    shapes = [jax.ShapeDtypeStruct((1, n, 2, 4), "float32") for n in (511, 512, 2047, 2048)]
    assert [executor.choose_config(growing, s).block_size for s in shapes] == [64, 128, 128, 256]
    assert growing(jnp.zeros((1, 8, 1, 1)))[0, 0, 0, 0] == 64


def test_values_of_arrays_are_not_in_keys_but_shapes_dtypes_and_static_values_are():
    key = key_of(SHOWN, ONES)
    assert key == key_of(SHOWN, 7 * ONES) == key_of(SHOWN, jnp.asarray(ONES))
    others = [key_of(SHOWN, ONES[:2]), key_of(SHOWN, ONES.astype(np.float16)), key_of(SHOWN, ONES, scale=2.0)]
    assert len({key, *others}) == 4
    selector = ConfigSelectorChain()
    selector.cache.put(key, Tiles(6))
    np.testing.assert_allclose(Executor(selector)(SHOWN, -ONES), 6 * ONES)


def test_calls_can_be_profiled(tmp_path):
    with jax.profiler.trace(str(tmp_path)):
        Executor(ConfigSelectorChain())(SHOWN, ONES).block_until_ready()
    assert list(tmp_path.rglob("*.xplane.pb"))


PATHS = {
    "core": "Kernel Invocation",
    "core.kernel": "Kernel",
    "core.types": "Cfg Out",
    "config.cache": "ConfigCache overlay_cache",
    "config.persistent": "PersistentCache",
    "config.selection": "ConfigSelectorChain AutotunePolicy policy_override",
    "execution.executor": "Executor ConfigChooser",
    "execution.batch": "vmap_with_config pmap_with_config",
    "execution.tuning": "Autotuner benchmark autotune AutotuningResult Entry",
    "execution.offline": "autotune_lowered",
    "registry": "record_invocation get_invocations",
    "utils.fingerprint": "device_fingerprint get_device_platform device_kind sharding_fingerprint",
    "utils.meta": "label extract_labels_from_hlo_text find_labels_in_lowered labels_to_configs LABEL_RE LABEL_PREFIXES",
    "modules": "flash_attention",
}


@pytest.mark.parametrize("path", PATHS)
def test_names_are_where_the_module_structure_has_them(path):
    module = importlib.import_module(f"ejkernel_ops.{path}")
    for name in PATHS[path].split():
        assert getattr(module, name) is getattr(ejkernel_ops, name)


def test_invocation_is_in_the_module_of_kernels():
    assert importlib.import_module("ejkernel_ops.core.kernel").Invocation is Invocation


# The page of labels


def test_a_label_is_made_of_prefix_operation_and_hash(monkeypatch):
    assert label("matmul@v1", HEX) == f"ejkernel_ops#matmul@v1:{HEX}"
    assert label("matmul@v1", HEX, "own#") == f"own#matmul@v1:{HEX}"
    monkeypatch.setenv("EJKERNEL_OPS_PREFIX", "env#")
    assert label("matmul@v1", HEX) == f"env#matmul@v1:{HEX}"
    assert label("matmul@v1", HEX, prefix="own#") == f"own#matmul@v1:{HEX}"


def test_the_hash_of_the_page_is_refused_for_it_is_not_hexadecimal():
    with pytest.raises(LabelError, match="16 hex digits"):
        label("matmul@v1", "1a2b3c4d5e6f7g8h")


def test_the_pattern_names_operation_and_key():
    assert LABEL_PREFIXES[0] == "ejkernel_ops#"
    found = LABEL_RE.search(f'name="jit(f)/ejkernel_ops#matmul@v1:{HEX}/dot"')
    assert (found["op"], found["key"]) == ("matmul@v1", HEX)


def test_configs_of_a_program_come_from_memory_then_disk_else_none(tmp_path):
    selector = ConfigSelectorChain(persistent=PersistentCache(path=tmp_path))
    arrays = [ONES, ONES[:2], ONES[:1]]
    lowered = jax.jit(lambda x: [SHOWN(x[:n]) for n in (3, 2, 1)]).lower(ONES)
    selector.persistent.put(key_of(SHOWN, arrays[0]), Tiles(3))
    selector.persistent.put(key_of(SHOWN, arrays[1]), Tiles(4))
    selector.cache.put(key_of(SHOWN, arrays[1]), Tiles(5))
    pairs = labels_to_configs(lowered, selector)
    assert isinstance(pairs, list)
    assert pairs == list(zip(find_labels_in_lowered(lowered), [Tiles(3), Tiles(5), None]))


# The page of offline tuning


def test_lowered_calls_are_tuned_stored_and_applied_inside_the_result(tmp_path):
    selector = ConfigSelectorChain(persistent=PersistentCache(path=tmp_path), tuner=quick_tuner())
    set_default_selector(selector)

    def step(a, b):
        return PRODUCT(a, b).sum()

    lowered = jax.jit(step).lower(A, B)
    result = autotune_lowered(selector, lowered)
    assert isinstance(result, AutotuningResult)
    assert [(type(e), e.op_id_v, e.call_key, e.cfg) for e in result.entries] == [
        (Entry, "guide_product@v1", key_of(PRODUCT, A, B).call_key, QUICK)
    ]
    assert result.device == device_fingerprint()
    key = key_of(PRODUCT, A, B)
    assert selector.cache.get(key) == selector.persistent.get(key) == QUICK
    set_default_selector(ConfigSelectorChain())
    executor = Executor()
    with result:
        assert executor.choose_config(PRODUCT, A, B) == QUICK
        np.testing.assert_allclose(jax.jit(step)(A, B), (A @ B).sum(), rtol=1e-5)
    assert executor.choose_config(PRODUCT, A, B) == DEFAULT


def test_tuned_configs_stay_off_the_disk_where_the_selector_says_so(tmp_path):
    selector = ConfigSelectorChain(persistent=PersistentCache(path=tmp_path), tuner=Tuner(), persist_autotune=False)
    autotune_lowered(selector, jax.jit(SHOWN).lower(ONES))
    assert selector.cache.get(key_of(SHOWN, ONES)) == Tiles(42)
    assert list(tmp_path.iterdir()) == []


def test_only_recorded_calls_are_tuned(monkeypatch):
    class Unseen(Shown):
        def __init__(self):
            Kernel.__init__(self, "guide_unseen")

    selector, kernel = ConfigSelectorChain(tuner=Tuner()), Unseen()
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "0")
    result = autotune_lowered(selector, jax.jit(lambda x: kernel(x) + 1).lower(ONES))
    ((text, reason),) = result.skipped
    assert result.entries == ()
    assert text == label(*key_of(kernel, ONES)[1:])
    assert "EJKERNEL_OPS_RECORD=0" in reason
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")
    result = autotune_lowered(selector, jax.jit(lambda x: kernel(x) + 2).lower(ONES))
    assert [e.cfg for e in result.entries] == [Tiles(42)]


@pytest.mark.cpu
def test_calls_with_functions_among_their_arguments_are_tuned():
    class Mapped(Kernel[Tiles, jax.Array]):
        name = "guide_mapped"

        def prepare(self, x, fn=None):
            return (x,), {"fn": fn or jnp.sin}

        def run(self, x, *, fn, cfg):
            return fn(x)

        def heuristic_cfg(self, inv):
            return Tiles()

        def candidate_cfgs_cpu(self, inv):
            return [Tiles(1), Tiles(2)]

        def candidate_cfgs(self, inv):
            raise AssertionError("the device has candidates of its own")

    mapped = Mapped()
    lowered = jax.jit(lambda x: mapped(x) + mapped(x, fn=jnp.cos)).lower(ONES)
    result = autotune_lowered(ConfigSelectorChain(tuner=quick_tuner()), lowered, strict=True)
    assert [{t.cfg for t in e.trials} for e in result.entries] == [{Tiles(), Tiles(1), Tiles(2)}] * 2


def test_a_program_of_real_ops_can_be_tuned():
    result = autotune_lowered(ConfigSelectorChain(tuner=quick_tuner()), jax.jit(linear).lower(A, B))
    assert [e.op_id_v for e in result.entries] == ["linear@v1"]
    assert result.skipped == ()


# The page of the registry


def test_registry_is_by_device_operation_and_key():
    args, kwargs = [A, B], {"scale": 2.0}
    record_invocation("gpu|guide", "guide_product@v1", HEX, PRODUCT, args, kwargs)
    args.clear()
    kwargs.clear()
    invocations = get_invocations("gpu|guide")
    assert list(invocations) == ["guide_product@v1"]
    ((key, (kernel, found, keywords)),) = invocations["guide_product@v1"].items()
    assert (key, kernel, keywords) == (HEX, PRODUCT, {"scale": 2.0})
    assert isinstance(found, tuple)
    assert [x.shape for x in found] == [(3, 4), (4, 2)]


def test_a_device_without_calls_has_an_empty_registry():
    assert get_invocations("gpu|another guide") == {}


def test_what_the_registry_returns_is_a_copy():
    record_invocation("gpu|guide copy", "guide_product@v1", HEX, PRODUCT, (A, B), {})
    get_invocations("gpu|guide copy").clear()
    get_invocations("gpu|guide copy")["guide_product@v1"].clear()
    assert list(get_invocations("gpu|guide copy")["guide_product@v1"]) == [HEX]


def test_a_kernel_without_heuristic_says_what_it_lacks():
    class Bare(Kernel[Tiles, jax.Array]):
        name = "guide_bare"

        def run(self, x, *, cfg):
            return x * cfg.block_size

    np.testing.assert_allclose(Bare()(ONES, cfg=Tiles(2)), 2 * ONES)
    with pytest.raises(ConfigError, match="defines no heuristic_cfg"):
        Bare()(ONES)
