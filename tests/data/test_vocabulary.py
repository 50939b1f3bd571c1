import pytest

from treedraft.data import DataError, Encoded, draft_vocabulary

ROWS = [Encoded("a", [9, 9, 9, 4, 4, 7], [0, 0, 0, 1, 1, 1], False), Encoded("b", [9, 4, 2, 8], [0, 1, 1, 1], False)]


def ids(size: int, always: tuple[int, ...] = ()) -> list[int]:
    vocabulary = draft_vocabulary(ROWS, 10, size, always)
    assert vocabulary.ids is not None
    return vocabulary.ids.tolist()


def test_the_most_frequent_supervised_ids_are_in_and_ties_go_by_the_lower_id():
    assert ids(1) == [4]
    assert ids(3) == [2, 4, 7]
    vocabulary = draft_vocabulary(ROWS, 10, 3)
    assert vocabulary.supervised == 6
    assert vocabulary.coverage == pytest.approx(5 / 6)


def test_ids_always_in_come_first_and_unused_ids_fill_up_from_below():
    assert ids(2, always=(9,)) == [4, 9]
    assert ids(7, always=(9,)) == [0, 1, 2, 4, 7, 8, 9]


def test_a_size_of_the_whole_vocabulary_needs_no_map():
    vocabulary = draft_vocabulary(ROWS, 10, 10)
    assert vocabulary.ids is None
    assert vocabulary.coverage == 1.0


def test_all_faults_are_named():
    with pytest.raises(DataError) as error:
        draft_vocabulary(ROWS, 8, 1, always=(0, 12))
    assert str(error.value) == (
        "no draft vocabulary: a draft vocabulary of 1 cannot hold the 2 ids that are always in it; "
        "ids that are always in it must lie in 0..7, got 0..12; "
        "the rows have the token id 8, the target's vocabulary is 8"
    )
