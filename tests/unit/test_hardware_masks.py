"""What is left visible by the mask variables, and which combinations are refused by the field's programs."""

import pytest

from anyrig.hardware import masks

FOUR = ["GPU-000000000000000a", "GPU-000000000000000b", "GPU-000000000000000c", "GPU-000000000000000d"]


def visible(env, uuids=FOUR):
    return masks.amd(env, uuids).visible


def conflicts(env, uuids=FOUR):
    return [(conflict.name, conflict.fatal) for conflict in masks.amd(env, uuids).conflicts]


def test_without_masks_everything_is_visible_and_nothing_is_wrong():
    assert visible({}) == (0, 1, 2, 3)
    assert conflicts({}) == []


def test_hip_selects_by_number_in_the_order_it_names():
    assert visible({"HIP_VISIBLE_DEVICES": "3, 1"}) == (3, 1)
    assert conflicts({"HIP_VISIBLE_DEVICES": "3,1"}) == []


def test_hip_honours_cudas_variable_where_its_own_is_unset():
    assert visible({"CUDA_VISIBLE_DEVICES": "2"}) == (2,)
    assert conflicts({"CUDA_VISIBLE_DEVICES": "2"}) == []


def test_hip_and_cuda_may_agree_but_not_differ():
    assert conflicts({"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0,1"}) == []
    assert conflicts({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}) == [("HIP and CUDA masks", True)]


def test_rocr_and_hip_nest_so_that_the_same_number_twice_can_hide_every_gpu():
    env = {"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}
    assert visible(env) == ()
    (conflict,) = masks.amd(env, FOUR).conflicts
    assert conflict.fatal and "no GPU at all" in conflict.sentence
    assert "Unset ROCR_VISIBLE_DEVICES" in conflict.remedy


def test_rocr_and_hip_together_select_within_what_rocr_left():
    env = {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}
    assert visible(env) == (3,)
    assert "which makes GPU 3" in masks.amd(env, FOUR).conflicts[0].sentence


def test_rocr_alone_works_but_ray_refuses_it():
    assert visible({"ROCR_VISIBLE_DEVICES": "2"}) == (2,)
    assert conflicts({"ROCR_VISIBLE_DEVICES": "2"}) == [("ROCR mask", False)]


def test_rocr_takes_the_names_that_rocminfo_prints():
    assert visible({"ROCR_VISIBLE_DEVICES": "GPU-000000000000000C,0"}) == (2, 0)


def test_a_mask_ends_at_the_first_entry_that_names_no_device():
    env = {"HIP_VISIBLE_DEVICES": "0,7,1"}
    assert visible(env) == (0,)
    (conflict,) = masks.amd(env, FOUR).conflicts
    assert conflict.fatal and "'7'" in conflict.sentence and "GPU 0 to 3" in conflict.sentence


@pytest.mark.parametrize(
    ("devices", "words"),
    [(FOUR, "only GPU 0 to 3 are openable"), (FOUR[:1], "only GPU 0 is openable"), ([], "none is")],
)
def test_a_mask_that_names_no_device_says_which_there_are(devices, words):
    (conflict,) = masks.amd({"HIP_VISIBLE_DEVICES": "9"}, devices).conflicts
    assert words in conflict.sentence


@pytest.mark.parametrize("value", ["", "NoDevFiles", "-1"])
def test_the_values_that_mean_no_device_hide_all_and_are_pointed_out(value):
    assert visible({"HIP_VISIBLE_DEVICES": value}) == ()
    assert conflicts({"HIP_VISIBLE_DEVICES": value}) == [("empty mask", False)]


def test_on_nvidia_a_mask_may_be_a_number_a_name_or_a_mig_slice():
    uuids = ["GPU-9221d5d1-b60b", "GPU-edfee158-11c1"]
    assert masks.nvidia({"CUDA_VISIBLE_DEVICES": "1"}, uuids).visible == (1,)
    assert masks.nvidia({"CUDA_VISIBLE_DEVICES": "GPU-edfe"}, uuids).visible == (1,)
    assert masks.nvidia({"CUDA_VISIBLE_DEVICES": "MIG-1"}, uuids).conflicts == ()


def test_on_nvidia_slurms_second_variable_is_a_warning():
    env = {"CUDA_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "0"}
    assert [c.name for c in masks.nvidia(env, ["GPU-1"]).conflicts] == ["ROCR mask"]
