"""Control: each request's drafter and number of drafts, chosen before a step runs.

1. Each request has an estimate of acceptance at each draft position, which starts from the estimate of its
   adapter and follows the request's own verified drafts (`acceptance`).
2. Step times are measured by number of rows and of drafts, and drafting time by drafter and number of drafts; a
   drafter's catching up with a request is priced per token (`costs`). Old times are forgotten.
3. `SpeculationPolicy.choose` sets each row's drafter and number of drafts so that expected tokens per expected second
   are maximal (`goodput`); if that gains less than a margin over no drafts, nothing is drafted.
4. An adapter whose requests get no drafts, or whose fallback is better, retries a drafter now and then; all trials
   together take at most about one per cent of the time (`adapters`).
5. After the step prompt lookup is asked before the first drafter: drafts after a match are verified instead if more of
   them are expected to be right (`matches`).
6. If steps take less than 3 ms the choice is made about once a second for all rows of an adapter in a class of batch
   sizes, since a choice in each step would cost more than it gains.
7. The drafts that were made have a confidence of the drafter's own. A fit of it to each adapter's verified drafts
   decides how many of a row's drafts are verified, by the same costs (`confidence`). So prompt lookup, which takes next
   to no time, drafts in every step. Drafts of captured graphs on a GPU have no confidence, and are all verified.

The policy drafts nothing itself: `DrafterGroup` calls the drafters that it chose. Text does not depend on any of this,
since all drafts are verified.
"""
