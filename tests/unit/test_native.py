"""Which build of the CPU kernels is imported: never one that the CPU can't run, and always with a reason."""

import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
from hardware_trees import CPU_NODE, Tree, build, facts

from anyrig.core.errors import UsageError
from anyrig.hardware import doctor
from anyrig.hardware.toolchain import Kernels
from anyrig.ops.cpu import native

ZEN5 = {name for needs in native.NEEDS.values() for name in needs}
HASWELL = {"avx2", "fma", "f16c", "bmi2"}
ALL = tuple(native.NEEDS)


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    """What an earlier test or the environment chose must not answer for this one."""
    monkeypatch.delenv(native.VARIABLE, raising=False)
    yield
    native._choose.cache_clear()
    native.features.cache_clear()


@pytest.fixture
def machine(monkeypatch):
    """Pretend a CPU with these features and these builds; returns the list of what is imported from then on."""

    def pretend(features, built=ALL, broken=()):
        native._choose.cache_clear()
        native.features.cache_clear()
        imported = []

        def fake_import(isa):
            if isa in broken:
                raise ImportError(f"{isa}: undefined symbol")
            imported.append(isa)
            module = ModuleType(f"{native.__package__}._{isa}")
            module.features = lambda: sorted(features)
            monkeypatch.setitem(sys.modules, module.__name__, module)
            return module

        monkeypatch.setattr(native, "built", lambda: tuple(built))
        monkeypatch.setattr(native, "_import", fake_import)
        monkeypatch.setattr(native, "platform", SimpleNamespace(machine=lambda: "x86_64"))
        return imported

    return pretend


def chosen():
    module = native.module()
    return module and module.__name__.rpartition("._")[2]


@pytest.mark.parametrize(
    ("features", "isa"),
    [
        (ZEN5, "avx512"),
        (ZEN5 - {"avx512bf16"}, "avx2"),
        (HASWELL, "avx2"),
        (HASWELL - {"fma"}, "portable"),
        ((), "portable"),
    ],
)
def test_the_best_build_that_the_cpu_has_all_instructions_of_is_chosen(machine, features, isa):
    imported = machine(features)
    assert chosen() == isa
    assert native.why_not() is None
    assert set(imported) <= {"portable", isa}, "a module that the CPU may not be able to run was imported"


@pytest.mark.parametrize("isa", ["avx2", "portable"])
def test_the_environment_asks_for_a_lesser_build(machine, monkeypatch, isa):
    machine(ZEN5)
    monkeypatch.setenv("ANYRIG_CPU_ISA", isa)
    assert chosen() == isa


def test_none_switches_the_kernels_off_and_says_so(machine, monkeypatch):
    imported = machine(ZEN5)
    monkeypatch.setenv("ANYRIG_CPU_ISA", "none")
    assert native.module() is None
    assert native.why_not() == "switched off by ANYRIG_CPU_ISA=none"
    assert imported == []


def test_a_build_that_the_cpu_lacks_is_refused_with_what_it_lacks_and_the_choices(machine, monkeypatch):
    imported = machine(HASWELL)
    monkeypatch.setenv("ANYRIG_CPU_ISA", "avx512")
    with pytest.raises(UsageError, match=r"ANYRIG_CPU_ISA=avx512.*lacks avx512f.*use one of avx2, portable, none"):
        native.module()
    assert "avx512" not in imported


def test_a_build_that_the_compiler_left_out_is_refused(machine, monkeypatch):
    machine(ZEN5, built=("avx2", "portable"))
    monkeypatch.setenv("ANYRIG_CPU_ISA", "avx512")
    with pytest.raises(UsageError, match="isn't built here"):
        native.module()


@pytest.mark.parametrize("value", ["avx9", "AVX2", "0"])
def test_a_value_that_does_not_exist_is_refused_with_the_choices(machine, monkeypatch, value):
    machine(ZEN5)
    monkeypatch.setenv("ANYRIG_CPU_ISA", value)
    with pytest.raises(UsageError, match=rf"ANYRIG_CPU_ISA={value}.*avx512, avx2, portable, none"):
        native.why_not()


def test_without_a_build_the_reason_says_how_that_came(machine, monkeypatch):
    machine((), built=())
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    assert native.module() is None
    assert native.why_not() == "not built: no C++ compiler at install"
    native._choose.cache_clear()
    monkeypatch.setattr(native.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert native.why_not().startswith("not built: the build failed at install")


@pytest.mark.parametrize("broken", ["avx2", "portable"])
def test_a_module_that_cannot_be_imported_is_a_reason_and_no_crash(machine, broken):
    machine(HASWELL, broken=(broken,))
    assert native.module() is None
    assert native.why_not() == f"import failed: {broken}: undefined symbol"


def test_asking_for_the_module_loads_neither_torch_nor_numpy():
    program = (
        "import sys; from anyrig.ops.cpu import native; native.module(); print({'torch', 'numpy'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_the_report_says_which_build_is_used_and_why_no_better_one(machine, monkeypatch):
    machine(ZEN5)
    assert native.report() == Kernels(ALL, "avx512", "the best there are")
    machine(ZEN5 - {"avx512bf16", "avx512vnni"})
    assert native.report() == Kernels(ALL, "avx2", "for avx512 the CPU lacks avx512vnni, avx512bf16")
    machine(ZEN5, built=("avx2", "portable"))
    report = native.report()
    assert report.used == "avx2" and "could not build avx512" in report.reason and "compiler" in report.remedy
    machine(ZEN5)
    monkeypatch.setenv("ANYRIG_CPU_ISA", "avx2")
    assert native.report() == Kernels(ALL, "avx2", "ANYRIG_CPU_ISA=avx2 asks for them", "Unset ANYRIG_CPU_ISA.")
    machine(HASWELL)
    assert native.report().remedy is None, "on this CPU the variable costs nothing"
    monkeypatch.setenv("ANYRIG_CPU_ISA", "avx512")
    report = native.report()
    assert report.used is None and "lacks avx512f" in report.reason and "Unset" in report.remedy


def findings(tmp_path, kernels, **changes):
    machine = facts(Tree(tmp_path).node(0, CPU_NODE), build("cpu"), kernels=kernels, **changes)
    return {finding.name: finding for finding in doctor.diagnose(machine)}, machine


def test_doctor_names_the_kernels_that_run(tmp_path):
    found, machine = findings(tmp_path, Kernels(ALL, "avx512", "the best there are"))
    assert found["kernels"].state == "ok"
    assert "avx512 kernels (built: avx512, avx2, portable)" in found["kernels"].sentence
    assert doctor.as_json(machine, [])["kernels"] == {
        "built": [*ALL],
        "used": "avx512",
        "reason": "the best there are",
    }


def test_doctor_warns_of_kernels_that_are_not_there_with_the_remedy(tmp_path, machine):
    machine((), built=())
    found, _ = findings(tmp_path, native.report())
    assert found["kernels"].state == "warning"
    assert "not built" in found["kernels"].sentence
    assert "make setup" in found["kernels"].remedy and "apt-get install g++" in found["kernels"].remedy


def test_built_kernels_need_no_compiler_any_more(tmp_path):
    found, _ = findings(tmp_path, Kernels(ALL, "avx2", "the best there are"), compilers={})
    assert found["compiler"].state == "ok"
    found, _ = findings(
        tmp_path, Kernels((), None, "not built: no C++ compiler at install", "Install one."), compilers={}
    )
    assert found["compiler"].state == "warning"
