/* The team in place of libgomp's, for another library: what its code calls is replaced in its table of
   addresses (the GOT of ELF), for this library alone. libgomp remains for numbers of threads, and for
   whoever comes while another thread has the team. */
#define _GNU_SOURCE
#include "team.h"
#if HAVE_TEAM
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__x86_64__)
enum { GLOBAL_DATA = R_X86_64_GLOB_DAT, JUMP_SLOT = R_X86_64_JUMP_SLOT };
#elif defined(__aarch64__)
enum { GLOBAL_DATA = R_AARCH64_GLOB_DAT, JUMP_SLOT = R_AARCH64_JUMP_SLOT };
#else
enum { GLOBAL_DATA = -1, JUMP_SLOT = -1 };
#endif

/* The functions of libgomp to which the library was bound. */
static struct {
    void (*parallel_start)(team_function, void *, unsigned);
    void (*parallel_end)(void);
    void (*parallel)(team_function, void *, unsigned, unsigned);
    void (*barrier)(void);
    _Bool (*static_start)(long, long, long, long, long *, long *);
    _Bool (*static_next)(long *, long *);
    void (*loop_end)(void);
    int (*thread_num)(void);
    int (*num_threads)(void);
    int (*in_parallel)(void);
    int (*max_threads)(void);
} gomp;

/* Of the calling thread: the regions of one part that it has begun within a part, and those that
   libgomp runs for it. */
static _Thread_local int inner, foreign;

/* The number of parts of a region, 0 if only libgomp knows. */
static unsigned parts_of(unsigned parts)
{
    return !parts && gomp.max_threads ? (unsigned)gomp.max_threads() : parts;
}

static int has_team(unsigned parts, team_function function, void *data)
{
    if (foreign || parts < 2 || (gomp.in_parallel && gomp.in_parallel()))
        return 0;
    return team_begin(function, data, (int)parts);
}

static void parallel_start(team_function function, void *data, unsigned parts)
{
    parts = parts_of(parts);
    if (team_parts())
        inner++;
    else if (!has_team(parts, function, data)) {
        foreign++;
        gomp.parallel_start(function, data, parts);
    }
}

static void parallel_end(void)
{
    if (inner)
        inner--;
    else if (team_parts())
        team_end();
    else {
        foreign -= foreign > 0;
        gomp.parallel_end();
    }
}

static void parallel(team_function function, void *data, unsigned parts, unsigned flags)
{
    parts = parts_of(parts);
    if (team_parts()) {
        inner++;
        function(data);
        inner--;
    }
    else if (has_team(parts, function, data)) {
        function(data);
        team_end();
    }
    else {
        foreign++;
        gomp.parallel(function, data, parts, flags);
        foreign--;
    }
}

static void barrier(void)
{
    if (!team_parts())
        gomp.barrier();
    else if (!inner)
        team_barrier();
}

static int thread_num(void)
{
    return !team_parts() ? gomp.thread_num() : inner ? 0 : team_part();
}

static int num_threads(void)
{
    return !team_parts() ? gomp.num_threads() : inner ? 1 : team_parts();
}

static int in_parallel(void)
{
    return team_parts() || gomp.in_parallel();
}

/* A loop that is divided among the parts in turn, in chunks, or evenly if they have no size. */
static _Thread_local struct {
    long start, step, count, chunk, stride, next;
} loop;

static _Bool static_next(long *from, long *to)
{
    if (!team_parts())
        return gomp.static_next(from, to);
    if (loop.next >= loop.count)
        return 0;
    long end = loop.count - loop.next < loop.chunk ? loop.count : loop.next + loop.chunk;
    *from = loop.start + loop.next * loop.step;
    *to = loop.start + end * loop.step;
    loop.next = loop.count - loop.next <= loop.stride ? loop.count : loop.next + loop.stride;
    return 1;
}

static _Bool static_start(long start, long end, long step, long chunk, long *from, long *to)
{
    if (!team_parts())
        return gomp.static_start(start, end, step, chunk, from, to);
    long parts = num_threads(), part = thread_num();
    long count = (end - start + step + (step > 0 ? -1 : 1)) / step;
    loop.start = start;
    loop.step = step;
    loop.count = count > 0 ? count : 0;
    if (chunk > 0) {
        loop.chunk = chunk;
        loop.stride = chunk * parts;
        loop.next = chunk * part;
    }
    else {
        long each = loop.count / parts, more = loop.count % parts;
        loop.next = each * part + (part < more ? part : more);
        loop.chunk = each + (part < more);
        loop.count = loop.next + loop.chunk;
        loop.stride = loop.chunk;
    }
    return static_next(from, to);
}

static void loop_end(void)
{
    if (!team_parts())
        gomp.loop_end();
}

typedef void (*any_function)(void);

static const struct {
    const char *name;
    any_function ours;
    any_function *theirs;
} replaced[] = {
#define REPLACED(symbol, function) {symbol, (any_function)function, (any_function *)&gomp.function}
    REPLACED("GOMP_parallel_start", parallel_start),
    REPLACED("GOMP_parallel_end", parallel_end),
    REPLACED("GOMP_parallel", parallel),
    REPLACED("GOMP_barrier", barrier),
    REPLACED("GOMP_loop_static_start", static_start),
    REPLACED("GOMP_loop_static_next", static_next),
    REPLACED("GOMP_loop_end_nowait", loop_end),
    REPLACED("omp_get_thread_num", thread_num),
    REPLACED("omp_get_num_threads", num_threads),
    REPLACED("omp_in_parallel", in_parallel),
    {"omp_get_max_threads", NULL, (any_function *)&gomp.max_threads},
    {"omp_set_num_threads", NULL, NULL},
};
enum { N_REPLACED = sizeof replaced / sizeof *replaced, MOST_SLOTS = 64 };

/* A library, and its slots that hold addresses of libgomp's functions. */
typedef struct {
    const void *address; /* within the library */
    const ElfW(Rela) *relocations[2];
    size_t counts[2];
    const ElfW(Sym) *symbols;
    const char *names;
    ElfW(Addr) base, read_only, read_only_end;
    any_function *slots[MOST_SLOTS];
    int which[MOST_SLOTS], n_slots;
} elf_library;

static int find(struct dl_phdr_info *info, size_t size, void *given)
{
    elf_library *library = given;
    const ElfW(Dyn) *dynamic = NULL;
    int inside = 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *header = &info->dlpi_phdr[i];
        ElfW(Addr) start = info->dlpi_addr + header->p_vaddr;
        if (header->p_type == PT_LOAD)
            inside |= (ElfW(Addr))library->address - start < header->p_memsz;
        else if (header->p_type == PT_DYNAMIC)
            dynamic = (const ElfW(Dyn) *)start;
        else if (header->p_type == PT_GNU_RELRO) {
            library->read_only = start;
            library->read_only_end = start + header->p_memsz;
        }
    }
    if (!inside || !dynamic) {
        library->read_only = library->read_only_end = 0;
        return 0;
    }
    library->base = info->dlpi_addr;
    for (; dynamic->d_tag != DT_NULL; dynamic++) {
        if (dynamic->d_tag == DT_RELA)
            library->relocations[0] = (const ElfW(Rela) *)dynamic->d_un.d_ptr;
        else if (dynamic->d_tag == DT_RELASZ)
            library->counts[0] = dynamic->d_un.d_val / sizeof(ElfW(Rela));
        else if (dynamic->d_tag == DT_JMPREL)
            library->relocations[1] = (const ElfW(Rela) *)dynamic->d_un.d_ptr;
        else if (dynamic->d_tag == DT_PLTRELSZ)
            library->counts[1] = dynamic->d_un.d_val / sizeof(ElfW(Rela));
        else if (dynamic->d_tag == DT_SYMTAB)
            library->symbols = (const ElfW(Sym) *)dynamic->d_un.d_ptr;
        else if (dynamic->d_tag == DT_STRTAB)
            library->names = (const char *)dynamic->d_un.d_ptr;
        else if (dynamic->d_tag == DT_PLTREL && dynamic->d_un.d_val != DT_RELA)
            return -1;
    }
    return 1;
}

/* Whether a slot holds the address of a function of another library, and not of a stub that is yet to
   look for it. */
static int is_bound(const elf_library *library, any_function function)
{
    Dl_info there, here;
    return dladdr((void *)function, &there) && dladdr(library->address, &here) &&
           there.dli_fbase != here.dli_fbase && strstr(there.dli_fname, "libgomp");
}

/* Find all slots of functions of OpenMP; returns whether every one of them can be replaced. */
static int find_slots(elf_library *library)
{
    for (int table = 0; table < 2; table++)
        for (size_t i = 0; i < library->counts[table]; i++) {
            const ElfW(Rela) *relocation = &library->relocations[table][i];
            int kind = (int)(relocation->r_info & 0xffffffff);
            if (kind != GLOBAL_DATA && kind != JUMP_SLOT)
                continue;
            const char *name = library->names + library->symbols[relocation->r_info >> 32].st_name;
            if (strncmp(name, "GOMP_", 5) && strncmp(name, "omp_", 4))
                continue;
            any_function *slot = (any_function *)(library->base + relocation->r_offset);
            int which = 0;
            while (which < N_REPLACED && strcmp(name, replaced[which].name))
                which++;
            if (which == N_REPLACED || library->n_slots == MOST_SLOTS || !is_bound(library, *slot))
                return 0;
            library->slots[library->n_slots] = slot;
            library->which[library->n_slots++] = which;
        }
    return library->n_slots > 0;
}

static int replace(const elf_library *library, any_function *slot, any_function ours)
{
    uintptr_t size = (uintptr_t)sysconf(_SC_PAGESIZE);
    void *page = (void *)((uintptr_t)slot & ~(size - 1));
    if (mprotect(page, size, PROT_READ | PROT_WRITE))
        return 0;
    __atomic_store_n(slot, ours, __ATOMIC_SEQ_CST);
    if ((ElfW(Addr))slot >= library->read_only && (ElfW(Addr))slot < library->read_only_end)
        mprotect(page, size, PROT_READ);
    return 1;
}

int team_adopt(const void *address)
{
    static int adopted = 0;
    elf_library library = {.address = address};
    if (adopted || dl_iterate_phdr(find, &library) != 1 || !library.names || !library.symbols)
        return 0;
    if (sizeof(void *) != 8 || !find_slots(&library))
        return 0;
    for (int i = 0; i < library.n_slots; i++)
        if (replaced[library.which[i]].theirs)
            *replaced[library.which[i]].theirs = *library.slots[i];
    adopted = 1;
    for (int i = 0; i < library.n_slots; i++)
        if (replaced[library.which[i]].ours &&
            !replace(&library, library.slots[i], replaced[library.which[i]].ours)) {
            while (i--) /* all or none */
                if (replaced[library.which[i]].ours)
                    replace(&library, library.slots[i], *replaced[library.which[i]].theirs);
            return 0;
        }
    return 1;
}
#else
typedef int no_openmp; /* a file has at least one declaration */
#endif
