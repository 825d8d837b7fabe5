"""What the CPU reader takes from cpuinfo, affinity and the control groups."""

from hardware_trees import GIB, SYSTEMD_V2, Tree

from anyrig.hardware import cpu, memory


def test_a_plain_machine_gives_all_its_cores_and_its_instruction_sets(tmp_path):
    found = cpu.read(Tree(tmp_path, cores=8).root)
    assert (found.model, found.cores, found.machine_cores) == ("AMD EPYC 9654 96-Core Processor", 8, 8)
    assert found.physical_cores == 4
    assert found.native_bf16 and found.native_int8 and found.simd_bits == 512
    assert found.instruction_sets == ["avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16"]


def test_affinity_leaves_the_cores_it_names_and_ignores_those_that_are_not_online(tmp_path):
    tree = Tree(tmp_path, cores=8)
    tree.write("proc/self/status", "Cpus_allowed_list:\t0-1,4,6-63\n")
    found = cpu.read(tree.root)
    assert found.allowed_cores == found.cores == 5
    assert found.physical_cores == 4


def test_a_quota_in_a_parent_group_binds_and_is_rounded_down(tmp_path):
    tree = Tree(tmp_path)
    tree.write("proc/self/mountinfo", SYSTEMD_V2)
    tree.write("proc/self/cgroup", "0::/machine.slice/job.scope\n")
    tree.write("sys/fs/cgroup/machine.slice/job.scope/cpu.max", "max 100000\n")
    tree.write("sys/fs/cgroup/machine.slice/cpu.max", "250000 100000\n")
    found = cpu.read(tree.root)
    assert found.quota == 2.5
    assert found.cores == 2


def test_less_than_one_core_still_gives_one_thread(tmp_path):
    tree = Tree(tmp_path)
    tree.write("proc/self/mountinfo", SYSTEMD_V2)
    tree.write("proc/self/cgroup", "0::/\n")
    tree.write("sys/fs/cgroup/cpu.max", "50000 100000\n")
    assert cpu.read(tree.root).cores == 1


def test_cgroup_v2_memory_is_limited_by_the_tightest_level_and_page_cache_counts_as_free(tmp_path):
    tree = Tree(tmp_path, memory=64 * GIB)
    tree.write("proc/self/mountinfo", SYSTEMD_V2)
    tree.write("proc/self/cgroup", "0::/pod/box\n")
    tree.write("sys/fs/cgroup/pod/box/memory.max", 12 * GIB)
    tree.write("sys/fs/cgroup/pod/memory.max", 8 * GIB)
    tree.write("sys/fs/cgroup/pod/memory.current", 6 * GIB)
    tree.write("sys/fs/cgroup/pod/memory.stat", f"anon {2 * GIB}\ninactive_file {3 * GIB}\nactive_file {GIB}\n")
    found = memory.read(tree.root)
    assert found.limit == 8 * GIB
    assert found.available == 6 * GIB


def test_memory_high_counts_as_a_limit(tmp_path):
    tree = Tree(tmp_path)
    tree.write("proc/self/mountinfo", SYSTEMD_V2)
    tree.write("proc/self/cgroup", "0::/box\n")
    tree.write("sys/fs/cgroup/box/memory.max", 16 * GIB)
    tree.write("sys/fs/cgroup/box/memory.high", 4 * GIB)
    tree.write("sys/fs/cgroup/box/memory.current", GIB)
    assert memory.available_bytes(tree.root) == 3 * GIB


def test_cgroup_v1_in_a_container_reads_its_own_mount_and_the_limit_of_unseen_parents(tmp_path):
    tree = Tree(tmp_path, memory=64 * GIB)
    mounts = (
        "35 31 0:32 /docker/ab12 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
        "32 31 0:29 /docker/ab12 /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n"
    )
    tree.write("proc/self/mountinfo", mounts)
    tree.write("proc/self/cgroup", "4:memory:/docker/ab12\n2:cpu,cpuacct:/docker/ab12\n0::/docker/ab12\n")
    tree.write("sys/fs/cgroup/memory/memory.limit_in_bytes", 16 * GIB)
    tree.write("sys/fs/cgroup/memory/memory.usage_in_bytes", 2 * GIB)
    tree.write("sys/fs/cgroup/memory/memory.stat", f"total_inactive_file {GIB}\nhierarchical_memory_limit {4 * GIB}\n")
    tree.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", 300000)
    tree.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", 100000)
    found = cpu.read(tree.root)
    assert found.memory_limit == 4 * GIB
    assert found.memory_available == 3 * GIB
    assert found.cores == 3


def test_the_numbers_that_mean_unlimited_limit_nothing(tmp_path):
    tree = Tree(tmp_path, memory=64 * GIB)
    mounts = (
        "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    )
    tree.write("proc/self/mountinfo", mounts)
    tree.write("proc/self/cgroup", "4:memory:/a\n2:cpu:/a\n")
    tree.write("sys/fs/cgroup/memory/a/memory.limit_in_bytes", 9223372036854771712)
    tree.write("sys/fs/cgroup/memory/a/memory.usage_in_bytes", GIB)
    tree.write("sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", -1)
    tree.write("sys/fs/cgroup/cpu/a/cpu.cfs_period_us", 100000)
    found = cpu.read(tree.root)
    assert found.memory_limit == found.memory_total == 64 * GIB
    assert found.memory_available == 32 * GIB
    assert found.quota is None


def test_a_group_that_is_already_over_its_limit_has_no_memory_left(tmp_path):
    tree = Tree(tmp_path)
    tree.write("proc/self/mountinfo", SYSTEMD_V2)
    tree.write("proc/self/cgroup", "0::/box\n")
    tree.write("sys/fs/cgroup/box/memory.max", GIB)
    tree.write("sys/fs/cgroup/box/memory.current", 2 * GIB)
    assert memory.available_bytes(tree.root) == 0


def test_an_arm_machine_without_model_name_or_core_ids_is_read_too(tmp_path):
    tree = Tree(tmp_path, cores=4)
    block = (
        "processor\t: {n}\nBogoMIPS\t: 2000.00\nFeatures\t: fp asimd asimddp bf16 i8mm sve\nCPU implementer\t: 0x41\n"
    )
    tree.write("proc/cpuinfo", "\n".join(block.format(n=n) for n in range(4)))
    found = cpu.read(tree.root)
    assert found.cores == found.physical_cores == 4
    assert found.native_bf16 and found.native_int8


def test_a_machine_without_proc_gives_something_usable(tmp_path):
    found = cpu.read(tmp_path)
    assert found.cores >= 1
    assert found.memory_available == 0


def test_this_machine_agrees_with_what_python_sees():
    import os

    found = cpu.read()
    assert 1 <= found.cores <= len(os.sched_getaffinity(0))
    assert 0 < found.memory_available <= found.memory_total == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
